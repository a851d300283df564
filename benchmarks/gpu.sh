#!/usr/bin/env bash
# Everything on a GPU host, in one command, without network and within about ten minutes:
# conformance on CUDA, the workloads against FBGEMM and torch, asv with the present commit, JSON and a short table.
# What is missing is named, and the rest goes on; without CUDA the rest is what there is to do on the CPU.
#
#   benchmarks/gpu.sh [FOLDER]        default: ./gpu-results
#
# PYTHON names the interpreter (default: python). It needs torch and keyedopt.
# IMPLEMENTATION is the target that is measured (default: fused).
# Exit code: 0; 1 if a part failed; 2 if there is no CUDA, or no keyedopt.
set -u
folder=${1:-gpu-results}
python=${PYTHON:-python}
target=${IMPLEMENTATION:-fused}
mkdir -p "$folder" || exit 2
folder=$(cd "$folder" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
failed=0 missing=

say() { printf '\n== %s\n' "$*"; }
has() { "$python" -c "import $1" 2>/dev/null; }
lacks() {
    echo "$1: $2"
    missing="$missing $1"
}

say "machine"
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem --format=csv,noheader 2>/dev/null ||
    echo "nvidia-smi: missing"
if ! has keyedopt.cli.main; then
    echo "keyedopt: missing in $python; install it, or set PYTHON"
    exit 2
fi
device=cuda
if ! "$python" -c "import torch; torch.empty(1, device='cuda')" 2>/dev/null; then
    lacks cuda "torch cannot use it here; going on with the CPU"
    device=cpu failed=2
fi
"$python" -c "import torch; print('torch', torch.__version__, 'CUDA', torch.version.cuda)"

peers=torch
for pair in triton:triton fbgemm:fbgemm_gpu torchrec:torchrec asv:asv; do
    if has "${pair#*:}"; then
        echo "${pair%:*}: found"
        case ${pair%:*} in fbgemm | torchrec) peers="$peers,${pair%:*}" ;; esac
    else
        lacks "${pair%:*}" "missing; going on without"
    fi
done

# One backend after the other; what a backend refuses, `auto` gives to the next. The times add up to 10 minutes.
conformance() {
    local backend=$1 limit=$2 code
    shift 2
    case " $missing " in *" $backend "*) return ;; esac
    say "conformance on $device, $backend"
    KEYEDOPT_BACKEND=$backend timeout -k 5 "$limit" "$python" -m keyedopt.cli.main check "$target" --device $device \
        --output "$folder/conformance-$backend.json" "$@" >"$folder/conformance-$backend.txt" 2>&1
    code=$?
    tail -n 3 "$folder/conformance-$backend.txt"
    [ $code -eq 0 ] || broke "exit $code; see $folder/conformance-$backend.txt"
}
broke() {
    echo "$1"
    [ $failed -ne 0 ] || failed=1
}
backed=(--area fused --area accumulate --area sparse --area in_backward --dtype float32)
first=triton
[ $device = cuda ] || first=native
conformance $first 120
conformance torch 40 "${backed[@]}"
conformance fbgemm 40 "${backed[@]}"
proof=()
[ -f "$folder/conformance-$first.json" ] && proof=(--conformance "$folder/conformance-$first.json")

if [ $device = cuda ]; then
    say "steps that do not wait, graphs, first steps"
    timeout -k 5 50 "$python" -m keyedopt.benchmarks.gpu_checks --implementation "$target" \
        --output "$folder/checks.json" 2>&1 | tee "$folder/checks.txt"
    [ "${PIPESTATUS[0]}" -eq 0 ] || broke "checks: see $folder/checks.txt"
fi

# A process for each part, so that one that breaks costs its own part alone.
part() {
    local name=$1 limit=50
    shift
    [ "$name" = tables ] || [ "$name" = backward ] && limit=80
    [ "$name" = usual ] && limit=200
    say "$name against $peers"
    timeout -k 5 "$limit" "$python" -m keyedopt.cli.main bench --implementation "$target" --device $device \
        --against "$peers" --output "$folder/$name.json" ${proof[@]+"${proof[@]}"} "$@" \
        2>&1 | tee "$folder/$name.txt"
    [ "${PIPESTATUS[0]}" -eq 0 ] || broke "$name: not measured"
}

if [ $device = cuda ]; then
    part tables --seconds 1 \
        --workload 8x200k-zipf --workload 8x200k-uniform --workload one-huge-table --workload small-step \
        --task train-rowwise_adagrad --task train-sgd --task train-adagrad --task train-adam
    part backward --seconds 1 \
        --workload 8x200k-zipf --workload one-huge-table --workload 500-tiny-tables --workload wide-rows \
        --workload all-the-same-row --workload all-distinct \
        --task backward-rowwise_adagrad --task backward-adam
    part dense --seconds 1 --workload tower-24m --workload 10k-parameters --task clip-adam --task state
    part sparse --seconds 1 --workload sparse-zipf --workload sparse-uniform
else
    part usual
fi

# What is installed is measured as the present commit. A process that was forked cannot use CUDA.
history() {
    local commit config=$folder/asv.conf.json chosen
    case " $missing " in *" asv "*) return ;; esac
    say "asv with the present commit"
    if ! commit=$(git -C "$root" rev-parse HEAD 2>/dev/null); then
        lacks git "$root is no checkout; going on without asv"
        return
    fi
    chosen="tables.Train.track_(seconds|throughput)\\(.rowwise_adagrad., .8x200k-zipf., .(fused:(triton|native)|torch|fbgemm|torchrec).\\)"
    (
        cd "$root" || exit 1
        "$python" -m keyedopt.benchmarks.gpu_summary --asv "$root/asv.conf.json" "$folder" || exit 1
        timeout -k 5 90 "$python" -m asv run --config "$config" --machine "$("$python" -m keyedopt.benchmarks.machine)" \
            --environment "existing:$("$python" -c 'import sys; print(sys.executable)')" --set-commit-hash "$commit" \
            --launch-method spawn --record-samples --bench "$chosen"
    ) 2>&1 | tee "$folder/asv.txt"
    [ "${PIPESTATUS[0]}" -eq 0 ] || broke "asv: see $folder/asv.txt"
}
history

say "geometric means of the ratios whose results match, verdicts, checks that did not hold, and asv's figures"
# shellcheck disable=SC2086
"$python" -m keyedopt.benchmarks.gpu_summary "$folder" $missing || broke "no summary"
say "written: $folder"
exit $failed
