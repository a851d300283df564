#!/usr/bin/env bash
# Measure everything on a GPU host in one command, without a network and within ten minutes:
# conformance on CUDA, the workloads against FBGEMM and torch, asv with the present commit, JSON and a short table.
# A missing tool is named and skipped. Without CUDA, the parts that need none run on the CPU.
# The folder has the results so far at any time, even if the script is killed.
#
#   benchmarks/gpu/gpu.sh [FOLDER]        default: ./gpu-results, or ./gpu-results-2 and so on
#
# PYTHON names the interpreter (default: python). It needs torch and keyedopt.
# IMPLEMENTATION is the target to measure (default: fused).
# KERNELS is an archive of kernels compiled ahead (default: kernels.tar.gz beside this script);
# `python -m keyedopt.tools.kernel_cache make` makes it without a GPU.
# BUDGET is the limit of all parts together, in seconds (default: 590).
# Exit code: 0; 1 if a part failed or reached its limit; 2 without CUDA or keyedopt, or if interrupted.
set -u
python=${PYTHON:-python}
target=${IMPLEMENTATION:-fused}
budget=${BUDGET:-590} reserve=20 # seconds to stop the last part and write the summary
failed=0 missing=() running=
exec 3>&1

if [ $# -gt 0 ]; then folder=$1; else
    folder=gpu-results number=1
    while [ -e "$folder" ]; do folder=gpu-results-$((number += 1)); done
fi
if compgen -G "$folder/*.json*" >/dev/null; then
    echo "$folder holds results of an earlier run: name another folder" >&2
    exit 2
fi
mkdir -p "$folder" || exit 2
folder=$(cd "$folder" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

say() { printf '\n== %s\n' "$*"; }
lacks() {
    echo "$1: $2"
    missing+=("$1")
}
broke() {
    echo "$1"
    [ $failed -ne 0 ] || failed=1
}

# Kill all processes of a session, including those in other process groups.
sweep() {
    local stat line fields
    for stat in /proc/[0-9]*/stat; do
        { line=$(<"$stat"); } 2>/dev/null || continue
        read -r -a fields <<<"${line##*) }" # state, parent, group, session
        [ "${fields[3]:-}" != "$1" ] || kill -KILL "$(basename "${stat%/stat}")" 2>/dev/null
    done
}

# Run a command in a session of its own, with a limit in seconds and its output in a file.
# Code 124: the command reached its limit.
within() {
    local limit=$1 file=$2 code
    shift 2
    setsid timeout -k 5 "$limit" "$@" >"$file" 2>&1 </dev/null 3>&- &
    running=$!
    wait "$running"
    code=$?
    sweep "$running"
    running=
    [ $code -ne 137 ] || code=124 # the command ignored SIGTERM
    return $code
}
has() { within 60 /dev/null "$python" -c "$1"; }

# Run a part: its name, its limit (at most the rest of the budget), the number of output lines to show, the command.
part() {
    local name=$1 limit=$2 lines=$3 left=$((budget - reserve - SECONDS)) code
    shift 3
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -le 0 ]; then
        broke "$name: no time is left"
        return 125
    fi
    say "$name, $limit s at most"
    within "$limit" "$folder/$name.txt" "$@"
    code=$?
    case $code in
        0 | 1 | 2) tail -n "$lines" "$folder/$name.txt" ;;
        124) echo "cut short" ;;
    esac
    [ $code -eq 0 ] || broke "$name: exit code $code; the output is in $folder/$name.txt"
    summarize >/dev/null
    return $code
}

summarize() { "$python" -m keyedopt.benchmarks.gpu.summary "$folder" ${missing[@]+"${missing[@]}"} "$@"; }
finish() {
    say "verdicts, failed checks, geometric means of the ratios with matching results, asv's values"
    summarize "$@" || broke "no summary"
    [ -z "${compiled:-}" ] || echo "kernels compiled ahead: $brought, here: $(($(kernels) - brought))"
    say "written: $folder"
    exit $failed
}
interrupted() {
    trap '' TERM INT HUP
    exec >&3 # stdout may be redirected where the signal arrives
    say "interrupted"
    failed=2
    if [ -n "$running" ]; then
        kill -TERM "$running" 2>/dev/null
        for _ in {1..50}; do
            kill -0 "$running" 2>/dev/null || break
            sleep 0.1
        done
        sweep "$running"
    fi
    finish --interrupted
}

say "machine"
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem --format=csv,noheader 2>/dev/null ||
    echo "nvidia-smi: missing"
trap interrupted TERM INT HUP
if ! has "import keyedopt.cli.main"; then
    echo "keyedopt: missing in $python; install it, or set PYTHON"
    exit 2
fi
device=cuda
if ! has "import torch; torch.empty(1, device='cuda')"; then
    lacks cuda "torch cannot use it here; going on with the CPU"
    device=cpu failed=2
fi
within 60 "$folder/versions.txt" "$python" -c "import torch; print('torch', torch.__version__, 'CUDA', torch.version.cuda)"
cat "$folder/versions.txt"

peers=torch
for pair in triton:triton fbgemm:fbgemm_gpu torchrec:torchrec asv:asv; do
    name=${pair%:*}
    if ! has "import ${pair#*:}"; then
        lacks "$name" "missing; going on without"
    elif [ $device$name = cudafbgemm ] && ! has "import fbgemm_gpu; import torch
assert torch._C._dispatch_has_kernel_for_dispatch_key('fbgemm::asynchronous_complete_cumsum', 'CUDA')"; then
        lacks "$name" "there, but for the CPU alone; going on without"
    else
        echo "$name: found"
        case $name in fbgemm | torchrec) peers="$peers,$name" ;; esac
    fi
done
lacking() { [[ " ${missing[*]-} " == *" $1 "* ]]; }

# Kernels compiled ahead, in an archive beside this script: a compiler takes minutes.
archive=${KERNELS:-$root/benchmarks/gpu/kernels.tar.gz} brought=0
kernels() { find "$TRITON_CACHE_DIR" -name '*.cubin' 2>/dev/null | wc -l; }
if [ $device = cuda ] && ! lacking triton; then
    export TRITON_CACHE_DIR=$folder/triton-cache
    compiled=yes
    if [ ! -f "$archive" ]; then
        echo "$(basename "$archive"): missing, so kernels are compiled here; make it without a GPU by" \
            "python -m keyedopt.tools.kernel_cache make"
    else
        within 60 "$folder/kernels.txt" "$python" -m keyedopt.tools.kernel_cache use "$TRITON_CACHE_DIR" \
            --archive "$archive"
        cat "$folder/kernels.txt"
        brought=$(kernels)
    fi
fi

# Check one backend after another; a backend that cannot do a task hands it to the next.
conformance() {
    local backend=$1 limit=$2
    shift 2
    lacking "$backend" || KEYEDOPT_BACKEND=$backend part "conformance-$backend" "$limit" 3 \
        "$python" -m keyedopt.cli.main check "$target" --device $device \
        --output "$folder/conformance-$backend.json" "$@"
}
backed=(--area fused --area accumulate --area sparse --area in_backward --dtype float32)
first=triton
[ $device = cuda ] || first=native
conformance $first 120
conformance torch 40 "${backed[@]}"
conformance fbgemm 40 "${backed[@]}"
proof=()
[ -f "$folder/conformance-$first.json" ] && proof=(--conformance "$folder/conformance-$first.json")

[ $device = cpu ] || part checks 50 100 \
    "$python" -m keyedopt.benchmarks.gpu.checks --implementation "$target" --output "$folder/checks.json"

# One process per part, so that a crash costs only that part.
speeds() {
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" 100 "$python" -m keyedopt.cli.main bench run --implementation "$target" --device $device \
        --against "$peers" --output "$folder/$name.json" ${proof[@]+"${proof[@]}"} "$@"
}
if [ $device = cuda ]; then
    speeds tables 80 --seconds 1 \
        --workload 8x200k-zipf --workload 8x200k-uniform --workload one-huge-table --workload small-step \
        --task train-rowwise_adagrad --task train-sgd --task train-adagrad --task train-adam
    speeds backward 80 --seconds 1 \
        --workload 8x200k-zipf --workload one-huge-table --workload 500-tiny-tables --workload wide-rows \
        --workload all-the-same-row --workload all-distinct \
        --task backward-rowwise_adagrad --task backward-adam
    speeds dense 50 --seconds 1 --workload tower-24m --workload 10k-parameters --task clip-adam --task state
    speeds sparse 50 --seconds 1 --workload sparse-zipf --workload sparse-uniform
else
    speeds usual 200
fi

# asv measures the installed keyedopt as the present commit, in one process per implementation, because asv writes
# its results at the end of each. A forked process cannot use CUDA.
history() {
    local commit box chosen subject
    if ! commit=$(git -C "$root" rev-parse HEAD 2>/dev/null); then
        lacks git "$root is no checkout, or git is missing; going on without asv"
        return
    fi
    if ! within 60 "$folder/asv.txt" "$python" -m keyedopt.benchmarks.asv.machine --beside ||
        ! "$python" -m keyedopt.benchmarks.gpu.summary --asv "$root/asv.conf.json" "$folder"; then
        broke "asv: the reason is in $folder/asv.txt"
        return
    fi
    box=$(tail -n 1 "$folder/asv.txt")
    for subject in fused:$first ${peers//,/ }; do
        chosen="tables.Train.track_(seconds|ratio|throughput)\\(.rowwise_adagrad., .8x200k-zipf., .$subject.\\)"
        part "asv-${subject#*:}" 60 0 "$python" -m asv run --config "$folder/asv.conf.json" --machine "$box" \
            --environment "existing:$("$python" -c 'import sys; print(sys.executable)')" \
            --set-commit-hash "$commit" --launch-method spawn --record-samples --bench "$chosen"
    done
}
lacking asv || history
finish
