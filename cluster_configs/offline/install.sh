#!/usr/bin/env bash
# Installs cfl_ray from the folder of this file, without an index: bash FOLDER/install.sh [arguments for pip]
# PYTHON: the interpreter of the environment, by default python3.
set -euo pipefail
cd "$(dirname "$0")"

sha256sum --check --quiet SHA256SUMS || { echo "error: files of $PWD are missing or damaged, see above; copy them again" >&2; exit 1; }

# wheels that were split are joined elsewhere, so that the folder stays as it was checked
joined=$(mktemp -d)
trap 'rm -rf "$joined"' EXIT
for first in *.part000; do
    [ -e "$first" ] || continue
    whole=${first%.part000}
    cat "$whole".part* > "$joined/$whole"
done
"${PYTHON:-python3}" -m pip install --no-index --find-links "$PWD" --find-links "$joined" "$@" cfl-ray
