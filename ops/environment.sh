# Makes `.venv` in the repository's root with pinned dependencies, once. Sourced by demo.sh and test.sh with the extras to install
# in $EXTRAS; afterwards $PYTHON is the environment's interpreter.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"

find_python() {
    local candidate
    for candidate in "${HOTDESK_PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    echo "hotdesk: no Python 3.11, 3.12 or 3.13 with the venv module was found (python3 is $(python3 --version 2>&1 || echo missing))." >&2
    echo "hotdesk: install one, or name it: HOTDESK_PYTHON=/path/to/python3.11 $0" >&2
    return 1
}

PYTHON="$ROOT/.venv/bin/python"
STAMP="$ROOT/.venv/.installed-$EXTRAS-$(cat pyproject.toml ops/constraints.txt | cksum | cut -d' ' -f1)"
if [ ! -e "$STAMP" ]; then
    BASE="$(find_python)"
    if [ ! -x "$PYTHON" ] || ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        echo "hotdesk: making .venv with $("$BASE" --version) ..."
        rm -rf "$ROOT/.venv"
        "$BASE" -m venv "$ROOT/.venv"
    fi
    echo "hotdesk: installing pinned dependencies (a minute or two, once) ..."
    # torch first: a plain request for it by another package could pick another build. Not compiled: what is imported is, when it first is,
    # and that is a small part of it.
    "$PYTHON" -m pip install --no-compile --quiet --disable-pip-version-check -c ops/constraints.txt torch 2> >(grep -v '^WARNING: Location' >&2)
    "$PYTHON" -m pip install --no-compile --quiet --disable-pip-version-check -c ops/constraints.txt -e ".[$EXTRAS]" 2> >(grep -v '^WARNING: Location' >&2)
    touch "$STAMP"
fi
export RAY_USAGE_STATS_ENABLED=0
