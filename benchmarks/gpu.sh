#!/usr/bin/env bash
# Everything on a GPU host, in one command, without network and within ten minutes:
# conformance on CUDA, the workloads against FBGEMM and torch, asv with the present commit, JSON and a short table.
# What is missing is named, and the rest goes on; without CUDA the rest is what there is to do on the CPU.
# What there is so far is in the folder at any time, also if this is killed.
#
#   benchmarks/gpu.sh [FOLDER]        default: ./gpu-results, or ./gpu-results-2 and so on
#
# PYTHON names the interpreter (default: python). It needs torch and keyedopt.
# IMPLEMENTATION is the target that is measured (default: fused).
# BUDGET is how many seconds all of it may take (default: 590).
# Exit code: 0; 1 if a part failed, or was cut short; 2 if there is no CUDA, or no keyedopt, or it was interrupted.
set -u
python=${PYTHON:-python}
target=${IMPLEMENTATION:-fused}
budget=${BUDGET:-590} reserve=20 # for the end: what a part takes to stop, and the summary
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
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '\n== %s\n' "$*"; }
lacks() {
    echo "$1: $2"
    missing+=("$1")
}
broke() {
    echo "$1"
    [ $failed -ne 0 ] || failed=1
}

# Ends what a session has left, also processes in groups of their own.
sweep() {
    local stat line fields
    for stat in /proc/[0-9]*/stat; do
        { line=$(<"$stat"); } 2>/dev/null || continue
        read -r -a fields <<<"${line##*) }" # state, parent, group, session
        [ "${fields[3]:-}" != "$1" ] || kill -KILL "$(basename "${stat%/stat}")" 2>/dev/null
    done
}

# Runs a command in a session of its own, with a limit in seconds. What it says goes to a file.
# Code 124: it was cut short.
within() {
    local limit=$1 file=$2 code
    shift 2
    setsid timeout -k 5 "$limit" "$@" >"$file" 2>&1 </dev/null 3>&- &
    running=$!
    wait "$running"
    code=$?
    sweep "$running"
    running=
    [ $code -ne 137 ] || code=124 # it did not heed the limit
    return $code
}
has() { within 60 /dev/null "$python" -c "$1"; }

# A part: its name, its limit (but no more than what is left of all the time), how many of the last lines are shown,
# and the command.
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
    [ $code -eq 0 ] || broke "$name: exit code $code; $folder/$name.txt has what it said"
    summarize >/dev/null
    return $code
}

summarize() { "$python" -m keyedopt.benchmarks.gpu_summary "$folder" ${missing[@]+"${missing[@]}"} "$@"; }
finish() {
    say "verdicts, checks that did not hold, geometric means of the ratios whose results match, asv's figures"
    summarize "$@" || broke "no summary"
    say "written: $folder"
    exit $failed
}
interrupted() {
    trap '' TERM INT HUP
    exec >&3 # it may come where what is said goes elsewhere
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

# One backend after the other; what a backend refuses, `auto` gives to the next.
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
    "$python" -m keyedopt.benchmarks.gpu_checks --implementation "$target" --output "$folder/checks.json"

# A process for each part, so that one that breaks costs its own part alone.
speeds() {
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" 100 "$python" -m keyedopt.cli.main bench --implementation "$target" --device $device \
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

# What is installed is measured as the present commit, by one process after the other, for asv writes at the end of
# each. A process that was forked cannot use CUDA.
history() {
    local commit box chosen subject
    if ! commit=$(git -C "$root" rev-parse HEAD 2>/dev/null); then
        lacks git "$root is no checkout, or git is missing; going on without asv"
        return
    fi
    if ! within 60 "$folder/asv.txt" "$python" -m keyedopt.benchmarks.machine --beside ||
        ! "$python" -m keyedopt.benchmarks.gpu_summary --asv "$root/asv.conf.json" "$folder"; then
        broke "asv: $folder/asv.txt has why"
        return
    fi
    box=$(tail -n 1 "$folder/asv.txt")
    for subject in fused:$first ${peers//,/ }; do
        chosen="tables.Train.track_(seconds|throughput)\\(.rowwise_adagrad., .8x200k-zipf., .$subject.\\)"
        part "asv-${subject#*:}" 60 0 "$python" -m asv run --config "$folder/asv.conf.json" --machine "$box" \
            --environment "existing:$("$python" -c 'import sys; print(sys.executable)')" \
            --set-commit-hash "$commit" --launch-method spawn --record-samples --bench "$chosen"
    done
}
lacking asv || history
finish
