#!/usr/bin/env bash
# pyarrow's CSV reader, and pandas with engine="pyarrow", read ids such as 0x1F as the integer 31; pandas and polars keep text.
#
# Tried with pyarrow 25.0.1, pandas 3.1.1 and polars 2.1.0 on Python 3.11.
# Guess: a column with a cell 0x1F is text in every reader, as no reader takes 1F or 0b11 as a number.
# Seen: pyarrow infers int64, and 0x1F and 31 are one value; pandas gives text with its own parser and integers with
# engine="pyarrow", which is recommended for its speed alone. polars gives text. A column of 1F alone is text everywhere.
# Federated learning names clients by ids of devices, often hexadecimal: with one reader two devices become one client, and the ids
# of two files of one study, read by two readers, do not match.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q pyarrow==25.0.1 pandas==3.1.1 polars==2.1.0
"$folder/venv/bin/python" - <<'PY'
import io

import pandas as pd
import polars as pl
import pyarrow.csv

text = b"device,x\n0x1F,1\n0x2A,2\n31,3\n"
found = {
    "pyarrow": pyarrow.csv.read_csv(io.BytesIO(text))["device"].to_pylist(),
    "pandas, pyarrow": pd.read_csv(io.BytesIO(text), engine="pyarrow")["device"].tolist(),
    "pandas": pd.read_csv(io.BytesIO(text))["device"].tolist(),
    "polars": pl.read_csv(text)["device"].to_list(),
}
for reader, ids in found.items():
    print(f"{reader}: {ids}, {len(set(ids))} devices")
assert found["pyarrow"] == found["pandas, pyarrow"] == [31, 42, 31]
assert found["pandas"] == found["polars"] == ["0x1F", "0x2A", "31"]
assert pyarrow.csv.read_csv(io.BytesIO(b"device\n1F\n2A\n"))["device"].to_pylist() == ["1F", "2A"]
PY
echo "as described"
