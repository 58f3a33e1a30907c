#!/usr/bin/env bash
# Flower's Krum and MultiKrum choose clients by their number of batches, if the model has BatchNorm layers.
#
# Tried with flwr 1.42.0 and torch 2.15.0 on Python 3.11.
# Guess: the distance of two clients is that of their weights, or the counts of batches that BatchNorm keeps hardly matter.
# Seen: `ArrayRecord(model.state_dict())`, as in Flower's examples, has the whole number num_batches_tracked of each BatchNorm
# layer, and the distance adds it to weights like any other number. Clients differ by tens or hundreds of batches, and weights by
# less than 1: the rule takes those whose number of samples is in the middle. An attacker with such a number that uploads five times
# its change in the other direction is kept, and the clients with most data are left out; without the counts, it is the other
# way round. Nothing warns. Bulyan's selection is the same function.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q flwr==1.42.0 torch==2.15.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import copy

import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import MultiKrum
from torch import nn

KEPT, SAMPLES = 8, [80, 112, 160, 240, 320, 400, 480, 560, 640, 320]  # the last one attacks


class Reply:
    """What a strategy reads of a message."""

    def __init__(self, values, samples):
        metrics = MetricRecord({"num-examples": samples, "client": samples})
        self.content = RecordDict({"arrays": ArrayRecord(values), "metrics": metrics})

    def has_error(self):
        return False


def trained(model, seed, samples):
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (samples,), generator=draw)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(99))[y] + torch.randn(samples, 16, generator=draw)
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        for x_b, y_b in zip(x.split(16), y.split(16)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(0.1 * x_b), y_b).backward()
            optimizer.step()
    return model.state_dict()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
sent = model.state_dict()
results = [trained(model, client, samples) for client, samples in enumerate(SAMPLES)]
results[-1] = {key: 6 * sent[key] - 5 * value if value.is_floating_point() else value for key, value in results[-1].items()}


def kept(with_counts):
    """Clients that MultiKrum averages, told by which of them change the average."""
    averages = []
    for left_out in [None, *range(len(SAMPLES))]:
        strategy, replies = MultiKrum(num_malicious_nodes=2, num_nodes_to_select=KEPT), []
        for client, result in enumerate(results):
            arrays = {key: value for key, value in result.items() if with_counts or "num_batches" not in key}
            arrays["mark"] = torch.tensor([1e-3 * (client == left_out)])  # too small to matter for distances
            replies.append(Reply(arrays, 1))
        averages.append(float(strategy.aggregate_train(1, replies)[0]["mark"].numpy()[0]))
    return [client for client, average in enumerate(averages[1:]) if average > averages[0]]


print("batches:", [int(result["1.num_batches_tracked"]) for result in results])
with_counts, without = kept(True), kept(False)
print("kept with the counts:", with_counts, "without:", without)
assert len(with_counts) == len(without) == KEPT
assert 9 in with_counts and 8 not in with_counts and 9 not in without and 8 in without
PY
echo "as described"
