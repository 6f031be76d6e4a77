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
# What computes in a process, on all cores; then what starts processes of its own or uses all cores itself, one after the other.
COMPUTING=(tests/workers/test_megatron.py tests/workers/test_sampler.py tests/workers/test_beside_engine.py tests/workers/test_simulated.py
    tests/workers/test_colocated.py tests/workers/test_sensitivity.py tests/simulation/test_every_state.py
    tests/golden tests/state tests/scheduler/test_core.py tests/scheduler/test_fairness.py tests/scheduler/test_moves.py)
status=0
"$PYTHON" -m pytest -n auto --maxprocesses 8 "${COMPUTING[@]}" || status=$?
"$PYTHON" -m pytest tests "${COMPUTING[@]/#/--ignore=}" || status=$?
exit "$status"
