#!/bin/sh
# Gets ready what `make engines` needs, in the directory given (which is ignored by git):
#
#   scripts/engines.sh DIRECTORY PYTHON    a virtual environment with vLLM for the CPU, NIXL, and this checkout of kvxfer
#
# constraints-engines.txt says what goes in.  pip's own settings are honoured, as everywhere (CONTRIBUTING.md).
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
[ $# -eq 2 ] || {
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
}
directory=$1
"$2" -c 'import sys; sys.exit("vLLM is pinned for Python 3.11, 3.12 and 3.13; this is " + sys.version) if not (3, 11) <= sys.version_info < (3, 14) else 0'

rm -rf "$directory"
"$2" -m venv "$directory"
pip() { "$directory/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
# Compiled as it is imported: most of it never is.
pip install --quiet --no-deps --no-compile --only-binary :all: --requirement "$root/constraints-engines.txt"
pip install --quiet --no-deps --no-build-isolation --editable "$root"
