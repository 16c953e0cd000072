#!/bin/sh
# Gets ready what `make containers` needs and cannot pip-install, in the directory given (which is ignored by git):
#
#   scripts/containers.sh engine                       a container engine: says which one, or what to install
#   scripts/containers.sh base DIRECTORY               DIRECTORY/base.tar, a root filesystem with Python
#   scripts/containers.sh wheels DIRECTORY PIP...      DIRECTORY/wheels, for the image; PIP... is the command to use
#
# Docker is taken where its daemon answers, otherwise Podman.  As root on Debian what is missing is installed; elsewhere
# this says what is missing, and fails.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
podman_packages="podman runc netavark aardvark-dns iptables uidmap catatonit"

docker_answers() { command -v docker >/dev/null && timeout 20 docker version >/dev/null 2>&1; }

may_install() { [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; }

install() {
    echo "Installing $*" >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get install --yes --no-install-recommends -qq "$@" >/dev/null || {
        apt-get update -qq
        apt-get install --yes --no-install-recommends -qq "$@" >/dev/null
    }
}

engine() {
    if docker_answers; then
        echo docker
        return
    fi
    if ! command -v podman >/dev/null || ! command -v runc >/dev/null || [ ! -x /usr/lib/podman/netavark ]; then
        if may_install; then
            # shellcheck disable=SC2086
            install $podman_packages
        else
            {
                echo "make containers needs Docker (a daemon that answers), or Podman with runc and netavark, as root."
                echo "Neither is there.  On Debian and Ubuntu, as root: apt-get install --no-install-recommends $podman_packages"
            } >&2
            exit 1
        fi
    fi
    if [ "$(id -u)" -ne 0 ]; then
        echo "make containers uses Podman as root: networks are broken on purpose.  Run it as root, or start Docker." >&2
        exit 1
    fi
    echo podman
}

base() {
    mkdir -p "$1"
    [ ! -s "$1/base.tar" ] || return 0
    if docker_answers; then return 0; fi # its own registry has one
    if ! command -v mmdebstrap >/dev/null; then
        if may_install; then
            install mmdebstrap
        else
            echo "make containers makes its base image with mmdebstrap; as root: apt-get install mmdebstrap" >&2
            exit 1
        fi
    fi
    echo "Making a root filesystem, once: $1/base.tar" >&2
    # python3-venv is for the stage that builds; it weighs 4 MB.
    mmdebstrap --quiet --format=tar --variant=minbase --include=python3,python3-venv,openssl bookworm "$1/base.tar.new"
    mv "$1/base.tar.new" "$1/base.tar"
}

wheels() {
    directory=$1
    shift
    rm -rf "$directory/wheels"
    mkdir -p "$directory/wheels"
    echo "Fetching wheels for the image: $directory/wheels" >&2
    # For the base's Python, whichever runs here.
    set -- "$@" download --quiet --disable-pip-version-check --only-binary :all: --python-version 3.11 --platform any \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --constraint "$root/constraints.txt" --dest "$directory/wheels"
    "$@" --no-deps nixl nixl-cu12 # their dependency is torch
    "$@" "$root" hatchling
}

case ${1:-} in
engine) engine ;;
base) base "$2" ;;
wheels) shift && wheels "$@" ;;
*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
