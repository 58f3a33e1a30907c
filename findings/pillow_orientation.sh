#!/usr/bin/env bash
# Pillow turns TIFF files as their orientation tag says, but not JPEG, PNG and WebP files with the same tag.
#
# Tried with Pillow 13.0.0, NumPy 2.4.6 on Python 3.11.
# Guess: the orientation is treated alike in all formats (not applied, until ImageOps.exif_transpose is called).
# Seen: the same 16x24 pixels with orientation 6 are opened as 24x16 and turned from TIFF, as 16x24 and not turned from
# JPEG, PNG and WebP; the tag is gone from the TIFF image only. Clients of a federation that store the same photographs in
# different formats (TIFF of a scanner, JPEG of a camera) so have inputs that are turned against each other, and
# ImageFolder of torchvision, which only opens and converts, hands them to the model like this.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q pillow==13.0.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import io
import numpy as np
from PIL import Image

pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
tag = Image.Exif()
tag[0x0112] = 6  # to be shown a quarter turn clockwise
seen = {}
for kind in ("TIFF", "PNG", "JPEG", "WEBP"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, exif=tag)
    image = Image.open(file).convert("RGB")
    seen[kind] = (image.height, image.width)
    print(kind, seen[kind], "turned" if seen[kind] == (24, 16) else "not turned")
assert seen == {"TIFF": (24, 16), "PNG": (16, 24), "JPEG": (16, 24), "WEBP": (16, 24)}
PY
echo "as described"
