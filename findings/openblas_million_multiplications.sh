#!/usr/bin/env bash
# NumPy's products with few rows are about three times as fast per multiplication below a million multiplications as above.
#
# Tried with numpy 2.4.2 and its OpenBLAS on Python 3.11, on an AMD EPYC with AVX-512, one thread.
# Guess: one product of a matrix with 6 rows and 25,088 columns is at least as fast as 28 products of its parts of 896 columns.
# Seen: the parts, in one call of numpy.matmul on a strided view, take about a third of the time. OpenBLAS copies the factors of a product into an
# order of its own before it multiplies them, unless rows x columns x inner length is at most a million and the CPU has AVX-512; with 6 rows
# the copy takes longer than the product. With OPENBLAS_CORETYPE=Haswell, as on a CPU without AVX-512, both take as long.
# Federated learning trains small networks: these are the gradients of the first convolution of LeNet-5 on CIFAR-10, batch 32.
set -euo pipefail
grep -q avx512f /proc/cpuinfo || { echo "this CPU has no AVX-512: nothing to see"; exit 0; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q numpy==2.4.2
cat > "$folder/products.py" <<'PY'
import time

import numpy as np

ROWS, INNER, PARTS, PART = 6, 75, 28, 896  # output channels; values of a patch; lines of the output; line x batch


def least_seconds(product):
    found = []
    for _ in range(30):
        began = time.thread_time()
        for _ in range(5):
            product()
        found.append(time.thread_time() - began)
    return min(found)


draw = np.random.default_rng(0)
grad = draw.random((ROWS, PARTS * PART), np.float32)
patches = draw.random((INNER, PARTS * PART), np.float32)
whole, parts = np.empty((INNER, ROWS), np.float32), np.empty((PARTS, INNER, ROWS), np.float32)
patches_of = patches.reshape(INNER, PARTS, PART).transpose(1, 0, 2)
grad_of = grad.reshape(ROWS, PARTS, PART).transpose(1, 2, 0)


def in_one():
    np.matmul(patches, grad.T, out=whole)


def in_parts():
    np.matmul(patches_of, grad_of, out=parts)
    return parts.sum(0)


in_one()
assert np.allclose(whole, in_parts(), rtol=1e-4)
print(f"{least_seconds(in_parts) / least_seconds(in_one):.2f}")
PY
one_thread() { env OPENBLAS_NUM_THREADS=1 "$@" "$folder/venv/bin/python" "$folder/products.py"; }
avx512=$(one_thread env) avx2=$(one_thread env OPENBLAS_CORETYPE=Haswell)
echo "time in parts, of the time in one: $avx512; with the kernels of AVX2: $avx2"
awk -v a="$avx512" -v b="$avx2" 'BEGIN { exit !(a < 0.6 && b > 0.7) }'
echo "as described"
