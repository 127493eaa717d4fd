#!/usr/bin/env bash
# The whole of it on a GPU machine, in at most B2G_MINUTES (8): calibrate, predict and freeze, measure, judge.
#
#   calibration/gpu/run.sh OUT
#
# README.md beside this file says what the variables are, and what OUT holds in the end. No network is used.
set -euo pipefail
begun=$(date +%s)
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
[ $# -eq 1 ] || { echo "usage: $0 OUT" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
[ -z "$(ls -A "$out")" ] || { echo "run.sh: $out is not empty: name a new folder" >&2; exit 2; }
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}" B2G_BEGUN="$begun" XDG_CACHE_HOME="${XDG_CACHE_HOME:-$out/cache}"

has_all() { "$1" -c 'import b2gmodel.cli, onnx, pydantic, pytriton, scipy, tritonclient' 2>"$out/missing.txt"; }

python=
for candidate in ${B2G_PYTHON:-"$repository/.venv/bin/python" python3 python}; do
    if command -v "$candidate" >/dev/null && has_all "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ] && [ -n "${B2G_WHEELS:-}" ]; then
    "${B2G_PYTHON:-python3}" -m venv --system-site-packages "$out/venv"
    "$out/venv/bin/python" -m pip install -q --no-index --no-deps "$B2G_WHEELS"/*.whl
    if has_all "$out/venv/bin/python"; then python=$out/venv/bin/python; fi
fi
if [ -z "$python" ]; then
    echo "run.sh: no Python here has all that b2gmodel[triton] needs ($(tail -n 1 "$out/missing.txt"));" \
        "name one with B2G_PYTHON, or a folder of wheels with B2G_WHEELS" >&2
    exit 2
fi
rm -f "$out/missing.txt"
exec "$python" "$here/run.py" "$out"
