#!/bin/sh
# Gets ready what `make bench` needs beside vLLM and NIXL, in the environment that scripts/engines.sh has made:
#
#   scripts/bench.sh DIRECTORY    Mooncake's transfer engine, the libraries of the system that it loads, matplotlib
#
# constraints-bench.txt says what goes in; of what is there nothing may change.  As root on Debian missing libraries are
# installed; elsewhere this says what is missing, and fails.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
[ $# -eq 1 ] || {
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
}
directory=$1
packages="libibverbs1 librdmacm1 libnuma1"

loads() { "$directory/bin/python" -c 'import mooncake.engine' 2>/dev/null; }

pip() { "$directory/bin/python" -m pip --disable-pip-version-check --no-input install --quiet "$@"; }
pip --upgrade 'pip>=25.3' # knows dependency groups
cd "$root"
pip --no-compile --only-binary :all: --constraint constraints-engines.txt --constraint constraints-bench.txt --group bench

if ! loads; then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        echo "Installing $packages" >&2
        export DEBIAN_FRONTEND=noninteractive
        # Without what they recommend: ibverbs-providers makes processes that have used NIXL crash when they end.
        install="apt-get install --yes --no-install-recommends -qq $packages"
        $install >/dev/null || {
            apt-get update -qq
            $install >/dev/null
        }
    fi
    loads || {
        {
            "$directory/bin/python" -c 'import mooncake.engine' 2>&1 | tail -1
            echo "make bench measures against Mooncake, which needs some libraries of the system."
            echo "On Debian and Ubuntu, as root: apt-get install --no-install-recommends $packages"
        } >&2
        exit 1
    }
fi
