#!/usr/bin/env bash
# Makes the environment and runs the tests: all of them, or what the arguments of pytest select.
#
#   scripts/test.sh [pytest arguments]                    see scripts/environment.sh for the environment
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/environment.sh" "$here/../requirements/test.txt"
cd "$repository"
say "running the tests"
exec "$PYTHON" -m pytest "$@"
