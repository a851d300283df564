#!/usr/bin/env bash
# The native kernels and fused/bulk under sanitizers, fed by fuzz.cpp; and the extension of fused/bulk as Python
# loads it, fed by fuzz_bulk.py: run.sh [SECONDS] [address|thread|module ...]; 20 s each by default.
set -euo pipefail
cd "$(dirname "$0")"
seconds=${1:-20}
shift || true
kinds=("$@")
[ ${#kinds[@]} -gt 0 ] || kinds=(address thread module)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python=${PYTHON:-python3}
# Without optimization the kernels compile in a third of the time, and the fuzzers make about as many calls.
flags=(-std=c++17 -O0 -g1 -ffp-contract=off -fno-math-errno -fno-omit-frame-pointer -pthread)

# Compiles sources to $scratch/KIND-*.o, two at a time.
compile() {
    local kind=$1
    shift
    objects=()
    for source in "$@"; do
        object=$scratch/$kind-$(basename "$source" .cpp).o
        "${CXX:-c++}" "${flags[@]}" "${sanitize[@]}" -c "$source" -o "$object" &
        objects+=("$object")
        [ "$(jobs -r | wc -l)" -lt 2 ] || wait -n
    done
    wait
}

for kind in "${kinds[@]}"; do
    sources=(fuzz.cpp fuzz_bulk.cpp ../../fused/bulk/dense.cpp ../../fused/bulk/squares.cpp)
    case $kind in
        address | module) sanitize=(-fsanitize=address,undefined -fno-sanitize-recover=all) ;;
        thread) sanitize=(-fsanitize=thread) ;;
        *) echo "run.sh: no sanitizer $kind; address, thread or module" >&2 && exit 2 ;;
    esac
    echo "== $kind"
    if [ "$kind" = module ]; then
        sanitize+=(-fPIC "-I$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')")
        compile module ../../fused/bulk/*.cpp
        "${CXX:-c++}" -shared "${sanitize[@]}" "${objects[@]}" -o "$scratch/_bulk.so"
        runtime=$("${CXX:-c++}" -print-file-name=libasan.so):$("${CXX:-c++}" -print-file-name=libstdc++.so)
        # Python and torch leave memory behind when they end.
        LD_PRELOAD=$runtime ASAN_OPTIONS=detect_leaks=0 \
            "$python" fuzz_bulk.py "$scratch/_bulk.so" "$seconds" "${SEED:-$RANDOM}"
        continue
    fi
    for source in ../../fused/backends/native/src/*.cpp; do
        grep -q '"parse.h"' "$source" || sources+=("$source") # the module needs Python; the engine does not
    done
    compile "$kind" "${sources[@]}"
    "${CXX:-c++}" -pthread "${sanitize[@]}" "${objects[@]}" -ldl -o "$scratch/$kind"
    run=("$scratch/$kind" "$seconds" "${SEED:-$RANDOM}")
    # ThreadSanitizer of some compilers cannot place its memory where the system has moved everything else.
    if [ "$kind" = thread ] && setarch -R true 2> /dev/null; then run=(setarch -R "${run[@]}"); fi
    TSAN_OPTIONS=halt_on_error=1 "${run[@]}"
done
