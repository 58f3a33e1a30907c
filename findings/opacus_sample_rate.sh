#!/usr/bin/env bash
# Opacus draws batches of another size than the DataLoader's, and drop_last, which it says it ignores, decides which.
#
# Tried with opacus 1.6.0 and torch 2.15.0 on Python 3.11.
# Guess: PrivacyEngine.make_private draws each sample with probability batch_size / samples, so that the mean batch is batch_size;
# drop_last has no effect, as the warning "Ignoring drop_last" says.
# Seen: the probability is 1 / len(loader), a number of whole batches. Batches of 64 of 100 samples become 50 on average, and with
# drop_last=True all 100. The same noise then costs a different epsilon. For data sets of many batches the difference is small; a
# client of a federation has few: 70 samples in batches of 64 are drawn with probability 0.5 (mean 35), or, with drop_last, 1,
# without any amplification by sampling. Epsilon is right for what is drawn; batch size and epsilon are not those asked for.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q opacus==1.6.0 torch==2.15.0
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def after_one_epoch(samples, batch_size, drop_last):
    torch.manual_seed(0)
    model, engine = nn.Linear(3, 2), PrivacyEngine()
    data = TensorDataset(torch.randn(samples, 3), torch.randint(2, (samples,)))
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=batch_size, drop_last=drop_last),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for _ in range(10):
        for inputs, targets in loader:
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    rate = loader.sample_rate
    print(
        f"{samples} samples, batch_size={batch_size}, drop_last={drop_last}: drawn with {rate:.3f} (guess "
        f"{batch_size / samples:.3f}), mean batch {rate * samples:.0f}, epsilon of ten epochs {engine.get_epsilon(1e-5):.1f}"
    )
    return rate


assert after_one_epoch(100, 64, False) == 0.5
assert after_one_epoch(100, 64, True) == 1.0
assert after_one_epoch(70, 64, False) == 0.5
assert after_one_epoch(70, 64, True) == 1.0
assert after_one_epoch(1000, 100, False) == after_one_epoch(1000, 100, True) == 0.1
PY
echo "as described"
