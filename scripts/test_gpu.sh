#!/usr/bin/env bash
# The GPU tests in the current Python environment: the kernels, then, where the host stack is installed, the backend.
#
#   scripts/test_gpu.sh [pytest arguments]        PYTHON=python3 by default; csa2 must be installed in it (pip install .)
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || { echo "no CUDA GPU is visible" >&2; exit 1; }
# From another folder, and without the current one on the path: the installed package is tested.
cd /
if "$PYTHON" -P -c 'import sglang' 2> /dev/null; then
    echo "== kernels and backend"
    exec "$PYTHON" -P -m pytest -p no:cacheprovider "$repository/tests/kernels" "$repository/tests/gpu" "$@"
fi
echo "== kernels alone: sglang is not installed here, so the backend is not tested"
exec "$PYTHON" -P -m pytest -p no:cacheprovider "$repository/tests/kernels" "$@"
