#!/bin/sh
# Certificates for mutual TLS between sidecars, to try things out: a CA whose key is thrown away, and a certificate for
# each directory, which has the directory's own name and every name that follows it after a colon.
#
#   deploy/certificates.sh DIRECTORY[:NAME...] ...
#
#   deploy/certificates.sh /tls/prefill /tls/decode          # DNS names prefill and decode
#   deploy/certificates.sh pods:kvxfer.internal              # DNS names pods and kvxfer.internal
#
# Each directory gets tls.crt, tls.key and ca.crt.  Nothing is done where all of them have certificates already.
# OWNER=10001:10001 gives the files to somebody; DAYS is how long they are good for (30).
set -eu

if [ "$#" -eq 0 ]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

missing=
for wanted; do
    [ -s "${wanted%%:*}/ca.crt" ] || missing=yes
done
[ -n "$missing" ] || exit 0

days=${DAYS:-30}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

new_key() { openssl genpkey -quiet -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>/dev/null ||
    openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"; }

new_key "$work/ca.key"
openssl req -x509 -new -key "$work/ca.key" -days "$days" -subj '/CN=kvxfer trial CA' -out "$work/ca.crt"

for wanted; do
    directory=${wanted%%:*}
    name=$(basename "$directory")
    names="DNS:$name"
    rest=${wanted#"$directory"}
    while [ -n "$rest" ]; do
        rest=${rest#:}
        names="$names,DNS:${rest%%:*}"
        case $rest in *:*) rest=:${rest#*:} ;; *) rest= ;; esac
    done
    mkdir -p "$directory"
    (umask 077 && new_key "$directory/tls.key")
    openssl req -new -key "$directory/tls.key" -subj "/CN=$name" -out "$work/request.pem"
    printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\nbasicConstraints=critical,CA:false\n' \
        "$names" >"$work/extensions"
    openssl x509 -req -in "$work/request.pem" -CA "$work/ca.crt" -CAkey "$work/ca.key" -CAcreateserial \
        -days "$days" -extfile "$work/extensions" -out "$directory/tls.crt" 2>/dev/null
    cp "$work/ca.crt" "$directory/ca.crt"
    if [ -n "${OWNER:-}" ]; then chown "$OWNER" "$directory/tls.key" "$directory/tls.crt" "$directory/ca.crt"; fi
    echo "$directory: $names"
done
