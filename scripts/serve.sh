#!/usr/bin/env bash
# From nothing to a server on a machine without a GPU (Python 3.11): makes the environment and the tiny model, starts
# the server with pools for a laptop and says how to talk to it. A second run reuses what exists.
#
#   scripts/serve.sh [further launch_server options]      PORT=30000 by default; see scripts/environment.sh for the rest
set -euo pipefail
# environment.sh would take these for requirement files.
options=("$@")
set --
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

model=$repository/configs/tiny-dsv41
port=${PORT:-30000}
if [ ! -e "$model/model.safetensors" ] || [ ! -e "$model/tokenizer.json" ]; then
    say "drawing the tiny model's weights"
    "$PYTHON" "$repository/scripts/make_tiny_checkpoint.py" "$model"
fi
say "starting the server on port $port (half a minute); it is up when /health answers"
cat <<MESSAGE

    curl http://127.0.0.1:$port/v1/chat/completions -H 'Content-Type: application/json' -d \\
      '{"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}'

    It has random weights: the answer is noise, computed exactly. Stop with Ctrl-C.

MESSAGE
# 16,384 tokens of context over 8 requests: pools of about 160 MB.
exec "$PYTHON" -m sglang.launch_server --attention-backend csa2 --device cpu --model-path "$model" \
    --served-model-name tiny --port "$port" \
    --max-running-requests 8 --context-length 8192 --max-total-tokens 16384 ${options[@]+"${options[@]}"}
