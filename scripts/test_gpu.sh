#!/usr/bin/env bash
# The GPU tests in the current Python environment: the kernels, then, where the host stack is installed, the backend
# over the host's pool, the 64-head tiny model against its golden values beside the host's own dsv4, two ranks where
# there are two GPUs, and the served tests of the CPU suite on the GPU.
#
#   scripts/test_gpu.sh [pytest arguments]        PYTHON=python3 by default; csa2 must be installed in it (pip install .)
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || { echo "no CUDA GPU is visible" >&2; exit 1; }
# From another folder, and without the current one on the path: the installed package is tested.
cd /
suites=("$repository/tests/kernels")
if "$PYTHON" -P -c 'import sglang' 2> /dev/null; then
    echo "== servers, backend and kernels"
    # Servers first: with -n (pytest-xdist) and --dist loadfile the longest files then run beside all others.
    suites=("$repository/tests/gpu" "$repository/tests/golden/test_served.py" "$repository/tests/host/test_server.py" "${suites[@]}")
else
    echo "== kernels alone: sglang is not installed here, so neither the backend nor a server is tested"
fi
export CSA2_TEST_DEVICE=cuda
exec "$PYTHON" -P -m pytest -p no:cacheprovider "${suites[@]}" "$@"
