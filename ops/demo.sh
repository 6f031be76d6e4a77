#!/usr/bin/env bash
# The main job on this machine: makes an environment if there is none, then runs `hotdesk demo`. Arguments go to it (try --help).
set -euo pipefail
EXTRAS=megatron
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "$PYTHON" -m ops.cli demo "$@"
