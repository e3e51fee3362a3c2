#!/usr/bin/env bash
# Every kernel table of docs/benchmarks.md on one GPU, one benchmark after the other: logs and JSON in a folder, and the
# picture of the index layers. A benchmark that fails is said at the end, and the exit status is 1; the rest still runs.
#
#   scripts/bench.sh FOLDER         PYTHON=python3 by default; csa2 must be installed in it (pip install .). With sglang,
#                                   sgl-flash-mla, sgl-deep-gemm and flashinfer installed the peers are timed too.
# Whole servers are scripts/bench_server.py's.
set -uo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
[ $# -eq 1 ] || { echo "usage: scripts/bench.sh FOLDER" >&2; exit 2; }
"$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || { echo "no CUDA GPU is visible" >&2; exit 1; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
failed=()

bench() {  # name, script, arguments
    local name=$1 script=$2
    shift 2
    echo "== $name"
    "$PYTHON" "$repository/scripts/$script" "$@" 2>&1 | tee "$folder/$name.log"
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed+=("$name")
}

# From another folder: the installed package is timed.
cd /
bench decode-attention bench_decode.py attention --json "$folder/decode-attention.json"
for step in scores select layer; do
    bench "decode-$step" bench_decode.py "$step" --json "$folder/decode-$step.json"
done
bench decode-memory bench_decode.py memory
for step in scores reindex; do
    bench "prefill-$step" bench_prefill.py "$step" --json "$folder/prefill-$step.json"
done
bench prefill-memory bench_prefill.py memory
bench routes bench_routes.py --json "$folder/routes.json"
bench picture plot_decode.py "$folder/decode-layer.json" "$folder/decode-layers.svg"
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}; their logs are in $folder" >&2
    exit 1
fi
