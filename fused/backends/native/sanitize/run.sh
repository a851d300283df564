#!/usr/bin/env bash
# The native kernels and fused/bulk under sanitizers, fed by fuzz.cpp: run.sh [SECONDS] [address|thread ...]; 20 s each by default.
set -euo pipefail
cd "$(dirname "$0")"
seconds=${1:-20}
shift || true
kinds=("$@")
[ ${#kinds[@]} -gt 0 ] || kinds=(address thread)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
sources=(fuzz.cpp fuzz_bulk.cpp ../../../bulk/dense.cpp ../../../bulk/squares.cpp)
for source in ../src/*.cpp; do
    grep -q '"parse.h"' "$source" || sources+=("$source") # the module needs Python; the engine does not
done
flags=(-std=c++17 -O1 -g -ffp-contract=off -fno-math-errno -fno-omit-frame-pointer -pthread)
for kind in "${kinds[@]}"; do
    case $kind in
        address) sanitize=(-fsanitize=address,undefined -fno-sanitize-recover=all) ;;
        thread) sanitize=(-fsanitize=thread) ;;
        *) echo "run.sh: no sanitizer $kind; address or thread" >&2 && exit 2 ;;
    esac
    echo "== $kind"
    objects=()
    for source in "${sources[@]}"; do
        object=$scratch/$kind-$(basename "$source" .cpp).o
        "${CXX:-c++}" "${flags[@]}" "${sanitize[@]}" -c "$source" -o "$object" &
        objects+=("$object")
        [ "$(jobs -r | wc -l)" -lt 2 ] || wait -n
    done
    wait
    "${CXX:-c++}" -pthread "${sanitize[@]}" "${objects[@]}" -o "$scratch/$kind"
    run=("$scratch/$kind" "$seconds" "${SEED:-$RANDOM}")
    # ThreadSanitizer of some compilers cannot place its memory where the system has moved everything else.
    if [ "$kind" = thread ] && setarch -R true 2> /dev/null; then run=(setarch -R "${run[@]}"); fi
    TSAN_OPTIONS=halt_on_error=1 "${run[@]}"
done
