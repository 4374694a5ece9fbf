#!/usr/bin/env bash
# Create .venv from requirements/cpu.lock (about 6.5 GB on disk). Does nothing when .venv already matches the lock.
# PYTHON=/path/to/python picks the interpreter; INSTALLER=pip uses pip instead of uv (for mirrors set in pip.conf).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
LOCK=requirements/cpu.lock
STAMP=.venv/.quads-lock.sha256
OURS=.venv/.quads # says that this script made .venv, finished or not
UV_VERSION=0.13.9

want=$(cat "$LOCK" pyproject.toml | sha256sum | cut -d' ' -f1)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$want" ] && [ -x .venv/bin/quads ]; then exit 0; fi

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13*/bin/python python3; do
        if usable "$candidate"; then echo "$candidate"; return 0; fi
    done
    return 1
}
python=$(find_python) || {
    echo "setup: no Python 3.12 or 3.13 with venv found (tried PYTHON, python3.12, python3.13, pyenv, python3);" \
        "install one: 'apt-get install python3.12-venv' or 'pyenv install 3.12', or set PYTHON=/path/to/python" >&2
    exit 2
}
if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "setup: the CPU lock holds Linux x86_64 wheels, this is $(uname -sm); run on such a machine" >&2
    exit 2
fi
free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
if [ "$free_kb" -lt 9000000 ]; then
    echo "setup: .venv needs 9 GB while it installs, $((free_kb / 1000000)) GB are free in $(pwd); free some space" >&2
    exit 2
fi

if [ -e .venv ] && [ ! -e "$OURS" ] && [ ! -e "$STAMP" ]; then
    echo "setup: $(pwd)/.venv was not made by this script; move it away" >&2
    exit 2
fi
echo "setup: creating .venv with $("$python" --version) ($python)"
rm -rf .venv
"$python" -m venv .venv
touch "$OURS"
if [ "${INSTALLER:-uv}" = pip ]; then
    .venv/bin/python -m pip install -q --no-deps -r "$LOCK"
    .venv/bin/python -m pip install -q --no-deps --no-build-isolation -e .
else
    .venv/bin/python -m pip install -q "uv==$UV_VERSION"
    .venv/bin/uv pip install -q --python .venv/bin/python --no-deps -r "$LOCK"
    .venv/bin/uv pip install -q --python .venv/bin/python --no-deps --no-build-isolation -e .
fi
# byte-code now: an engine start takes 20 s with it and minutes without (and some machines forbid writing it later)
.venv/bin/python -m compileall -q -j 0 -x '/(tests?|testing|benchmarks?)/' .venv/lib/python3.*/site-packages >/dev/null 2>&1 || true
echo "$want" >"$STAMP"
echo "setup: done"
