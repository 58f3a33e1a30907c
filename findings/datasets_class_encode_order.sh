#!/usr/bin/env bash
# Hugging Face datasets: class_encode_column renumbers integer labels in the order of their text, from eleven classes on.
#
# Tried with datasets 4.8.5 on Python 3.11.
# Guess: labels 0 to 11 that become a ClassLabel keep their numbers, with names "0" to "11".
# Seen: the classes are sorted as text, so that label 2 becomes 4, 10 becomes 2 and 11 becomes 3; with ten classes or fewer all stay.
# train_test_split(stratify_by_column=...) accepts a ClassLabel alone, so that this is the usual step before it.
# Federated learning gives each client a part of such a set: a part that was encoded and a test set that was not, or a client
# that lacks a class, have other numbers for the same class, as for FEMNIST's 62 or CIFAR-100's hundred.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==4.8.5
"$folder/venv/bin/python" - <<'PY'
import datasets

datasets.disable_progress_bars()


def encoded(labels):
    return list(datasets.Dataset.from_dict({"label": labels}).class_encode_column("label")["label"])


print("0 to 11 become", encoded(list(range(12))))
print("a client without class 1: 0, 2, 3 become", encoded([0, 2, 3]))
assert encoded(list(range(10))) == list(range(10))
assert encoded(list(range(12))) == [0, 1, 4, 5, 6, 7, 8, 9, 10, 11, 2, 3]
assert encoded([0, 2, 3]) == [0, 1, 2]
PY
echo "as described"
