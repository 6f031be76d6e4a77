#!/usr/bin/env bash
# The whole suite: lint, types, then every test, with real server, Ray and Megatron. Arguments go to pytest instead of `tests`.
set -euo pipefail
EXTRAS=megatron,test
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if [ "$#" -eq 0 ]; then
    "$PYTHON" -m ruff check .
    "$PYTHON" -m ruff format --check .
    "$PYTHON" -m mypy
    set -- tests
fi
exec "$PYTHON" -m pytest "$@"
