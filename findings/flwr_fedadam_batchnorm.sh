#!/usr/bin/env bash
# Flower's FedAdam, with its defaults, makes variances of BatchNorm negative: the global model predicts NaN.
#
# Tried with flwr 1.42.0 and torch 2.15.0 on Python 3.11.
# Guess: the adaptive step is for trained weights; running means and variances are averaged, as FedAvg does.
# Seen: every array of `model.state_dict()` is stepped, so each variance falls by the same 0.1 or so a round from 1 on, whatever
# its distance from the clients' mean, and the momentum carries small ones past 0. With features of a standard deviation of 0.1 the
# global model has an accuracy of 0.99 in round 10, and predicts NaN for every sample in round 20. Training goes on as if nothing had
# happened, since BatchNorm uses the batch's own statistics there. num_batches_tracked, 80 with FedAvg, becomes 0.1. FedAvg with the
# same clients keeps an accuracy of 0.99.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q flwr==1.42.0 torch==2.15.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import copy

import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg
from torch import nn


class Reply:
    """What a strategy reads of a message."""

    def __init__(self, model, samples):
        metrics = MetricRecord({"num-examples": samples})
        self.content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})

    def has_error(self):
        return False


def data(seed, samples):
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (samples,), generator=draw)
    means = torch.randn(4, 16, generator=torch.Generator().manual_seed(99))
    return 0.1 * (means[y] + torch.randn(samples, 16, generator=draw)), y


def trained(model, client):
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x_b, y_b in zip(*(values.split(16) for values in data(client, 64))):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x_b), y_b).backward()
        optimizer.step()
    return model


def accuracies(strategy):
    torch.manual_seed(0)
    model, found = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)), {}
    for current in range(1, 21):
        strategy.current_arrays = {key: value.numpy() for key, value in model.state_dict().items()}  # as configure_train
        arrays, _ = strategy.aggregate_train(current, [Reply(trained(model, client), 64) for client in range(5)])
        model.load_state_dict(arrays.to_torch_state_dict())
        x, y = data(77, 500)
        outputs = model.eval()(x)
        found[current] = float((outputs.argmax(1) == y).float().mean()), bool(outputs.isnan().all())
    least, count = float(model[1].running_var.min()), float(arrays["1.num_batches_tracked"].numpy())
    print(f"{type(strategy).__name__}: (accuracy, NaN) in rounds 10 and 20: {found[10]}, {found[20]}; "
          f"least variance {least:.3f}, batches {count:.2f}")
    return found, least


averaged, least_averaged = accuracies(FedAvg())
stepped, least_stepped = accuracies(FedAdam())
assert averaged[20][0] > 0.95 and not averaged[20][1] and least_averaged > 0
assert stepped[10][0] > 0.95 and stepped[20][1] and least_stepped < 0
PY
echo "as described"
