#!/usr/bin/env bash
# An offline run of Weights & Biases on a full disk loses records, and ends as if all of them were there.
#
# Tried with wandb 0.31.0, Python 3.11, Linux.
# Guess: `run.log` or `run.finish` raises OSError, or at least a line on the terminal says that records are lost.
# Seen: neither raises, the status of the process is 0, and the last line says how to sync the run. The records that had no
# room are missing; "no space left on device" is in debug-internal.log alone, which is on the same disk. Federated
# simulations run for days offline on shared disks with quotas, and their last rounds are the ones that are missing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q wandb==0.31.0
cat >"$folder/look.py" <<'PY'
import sys
from pathlib import Path

import wandb

run = wandb.init(project="p", mode="offline", dir=sys.argv[1])
for step in range(300):
    run.log({f"metric_{number}": float(step + number) for number in range(20)}, step=step)
run.finish()
print("finished without an error;", sum(path.stat().st_size for path in Path(sys.argv[1]).rglob("*.wandb")), "bytes")
PY
mkdir "$folder/room" "$folder/full"
"$folder/venv/bin/python" "$folder/look.py" "$folder/room" >"$folder/room.out" 2>&1
cat >"$folder/full.sh" <<'SH'
set -euo pipefail
mount -t tmpfs -o size=32k none "$1/full"
"$1/venv/bin/python" "$1/look.py" "$1/full" >"$1/full.out" 2>&1
grep -l "no space left on device" "$1"/full/wandb/offline-run-*/logs/debug-internal.log >"$1/log.out"
SH
private=(unshare --mount) # a mount namespace of its own, for the small disk
[ "$(id -u)" = 0 ] || private+=(--map-root-user)
"${private[@]}" bash "$folder/full.sh" "$folder"
room=$(grep finished "$folder/room.out") full=$(grep finished "$folder/full.out")
echo "with room: $room"
echo "disk full: $full"
[ "$(grep -o '[0-9]* bytes' <<<"$room" | cut -d' ' -f1)" -gt 150000 ]
[ "$(grep -o '[0-9]* bytes' <<<"$full" | cut -d' ' -f1)" -le 32768 ]
grep -q "wandb sync" "$folder/full.out"
if grep -qi "no space\|error:\|lost" "$folder/full.out"; then exit 1; fi
[ -s "$folder/log.out" ]
echo "as described"
