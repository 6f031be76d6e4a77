#!/usr/bin/env bash
# The whole suite: lint, types, then every test, with real server, Ray and Megatron. Arguments go to pytest instead of `tests`.
set -euo pipefail
EXTRAS=megatron,test
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if [ "$#" -gt 0 ]; then
    exec "$PYTHON" -m pytest "$@"
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
# What only computes takes what is left of the cores by those that wait for processes of their own; its words come when those have ended.
COMPUTING=(tests/workers/test_megatron.py tests/workers/test_colocated.py tests/workers/test_sensitivity.py tests/simulation
    tests/golden tests/state tests/scheduler/test_core.py tests/scheduler/test_fairness.py tests/scheduler/test_moves.py)
WORDS="$(mktemp)"
nice -n 19 "$PYTHON" -m pytest -n auto --maxprocesses 8 "${COMPUTING[@]}" >"$WORDS" 2>&1 &
COMPUTES=$!
trap 'kill "$COMPUTES" 2>/dev/null || true; rm -f "$WORDS"' EXIT
status=0
"$PYTHON" -m pytest tests "${COMPUTING[@]/#/--ignore=}" || status=$?
echo "Tests that only compute, which ran beside these:"
wait "$COMPUTES" || status=$?
cat "$WORDS"
exit "$status"
