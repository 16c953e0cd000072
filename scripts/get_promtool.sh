#!/usr/bin/env bash
# Put promtool where $1 says: the one of the PATH, or that of the Debian package `prometheus`, of which nothing is
# installed.  Tested with that of Debian 12, 2.42.0.  Says what is missing where neither can be had, or not soon; the
# tests that need it are then skipped.
set -euo pipefail
target="$1"
[ -x "$target" ] && exit 0
if found="$(command -v promtool)"; then
    ln -sf "$found" "$target"
    exit 0
fi
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    echo "promtool is not in the PATH, and this is no Debian or Ubuntu to get it from" >&2
    exit 1
fi
place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
cd "$place"
chmod 755 .
# apt's own sandbox cannot write here, and need not: what comes is checked against the signed lists all the same.
fetch() { timeout 60 apt-get --quiet=2 -o APT::Sandbox::User=root -o Acquire::Retries=0 download prometheus; }
if ! fetch 2>/dev/null; then
    if [ "$(id -u)" -ne 0 ]; then
        echo "promtool is not in the PATH, and apt-get cannot get the package prometheus (after apt-get update it may)" >&2
        exit 1
    fi
    timeout 60 apt-get --quiet=2 -o Acquire::Retries=0 update
    fetch
fi
dpkg-deb --fsys-tarfile prometheus_*.deb | tar --extract --file=- ./usr/bin/promtool
cd - >/dev/null
mv "$place/usr/bin/promtool" "$target"
