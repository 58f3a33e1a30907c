#!/usr/bin/env bash
# Flower Datasets' IidPartitioner does not draw: partitions of a data set that is sorted by label have one label each.
#
# Tried with flwr-datasets 0.6.1, datasets 4.8.5 and NumPy 2.4.6 on Python 3.11.
# Guess: as its docstring says, a partition is a random sample, so each of ten partitions of sorted data has all ten labels.
# Seen: partition i is the i-th tenth of the rows in their order. FederatedDataset shuffles before (shuffle=True), but data of
# one's own are given as `partitioner.dataset = ...`, and then nothing shuffles: image folders and many exports are sorted by
# class, and the baseline "IID" is the hardest label skew there is, one class a client. Nothing warns. Dataset.shuffle mends it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q flwr-datasets==0.6.1 datasets==4.8.5 numpy==2.4.6
HF_HOME="$folder" "$folder/venv/bin/python" -W error - <<'PY'
import numpy as np
from datasets import Dataset, disable_progress_bars
from flwr_datasets.partitioner import IidPartitioner

disable_progress_bars()


def labels(data):
    partitioner = IidPartitioner(num_partitions=10)
    partitioner.dataset = data
    return [sorted(set(partitioner.load_partition(i)["label"])) for i in range(10)]


assert "sampled randomly" in IidPartitioner.__doc__
data = Dataset.from_dict({"label": np.repeat(np.arange(10), 100)})
as_they_are, shuffled = labels(data), labels(data.shuffle(seed=0))
print("labels of the partitions:", as_they_are)
assert as_they_are == [[label] for label in range(10)]
assert shuffled == [list(range(10))] * 10
PY
echo "as described"
