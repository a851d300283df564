#!/usr/bin/env bash
# Everything on a GPU host, in one command, without network and within about ten minutes:
# conformance on CUDA, the workloads against FBGEMM and torch, JSON and a short table.
# What is missing is named, and the rest goes on.
#
#   benchmarks/gpu.sh [FOLDER]        default: ./gpu-results
#
# PYTHON names the interpreter (default: python). It needs torch with CUDA and keyedopt.
# IMPLEMENTATION is the target that is measured (default: fused).
set -u
folder=${1:-gpu-results}
python=${PYTHON:-python}
target=${IMPLEMENTATION:-fused}
mkdir -p "$folder" || exit 2
failed=0

say() { printf '\n== %s\n' "$*"; }
has() { "$python" -c "import $1" 2>/dev/null; }

say "machine"
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem --format=csv,noheader 2>/dev/null ||
    echo "nvidia-smi: missing"
if ! has keyedopt.cli.main; then
    echo "keyedopt: missing in $python; install it, or set PYTHON"
    exit 2
fi
if ! "$python" -c "import torch; torch.empty(1, device='cuda')" 2>/dev/null; then
    echo "CUDA: torch cannot use it here; nothing to measure"
    exit 2
fi
"$python" -c "import torch; print('torch', torch.__version__, 'CUDA', torch.version.cuda)"

peers=torch
for pair in triton:triton fbgemm:fbgemm_gpu torchrec:torchrec; do
    if has "${pair#*:}"; then
        echo "${pair%:*}: found"
        [ "${pair%:*}" = triton ] || peers="$peers,${pair%:*}"
    else
        echo "${pair%:*}: missing; going on without"
    fi
done

say "conformance on CUDA"
timeout 240 "$python" -m keyedopt.cli.main check "$target" --device cuda --dtype float32 \
    --output "$folder/conformance.json" >"$folder/conformance.txt" 2>&1
code=$?
tail -n 3 "$folder/conformance.txt"
[ $code -eq 0 ] || { echo "exit $code; see $folder/conformance.txt"; failed=1; }
proof=()
[ -f "$folder/conformance.json" ] && proof=(--conformance "$folder/conformance.json")

# A process for each part, so that one that breaks costs its own part alone.
part() {
    local name=$1
    shift
    say "$name against $peers"
    timeout 150 "$python" -m keyedopt.cli.main bench --implementation "$target" --device cuda \
        --against "$peers" --output "$folder/$name.json" ${proof[@]+"${proof[@]}"} "$@" \
        2>&1 | tee "$folder/$name.txt"
    [ "${PIPESTATUS[0]}" -eq 0 ] || { echo "$name: not measured"; failed=1; }
}

part tables --seconds 1 \
    --workload 8x200k-zipf --workload 8x200k-uniform --workload one-huge-table --workload small-step \
    --task train-rowwise_adagrad --task train-sgd --task train-adagrad --task train-adam
part backward --seconds 1 \
    --workload 8x200k-zipf --workload one-huge-table --workload 500-tiny-tables --workload wide-rows \
    --workload all-the-same-row --workload all-distinct \
    --task backward-rowwise_adagrad --task backward-adam
part dense --seconds 1 --workload tower-24m --workload 10k-parameters --task clip-adam --task state
part sparse --seconds 1 --workload sparse-zipf --workload sparse-uniform

say "geometric means of the ratios whose results match"
"$python" - "$folder" <<'END'
import json, math, pathlib, sys

ratios = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    report = json.loads(path.read_text())
    for row in report.get("rows", []):
        if row["matches"]:
            ratios.setdefault((row["task"], row["peer"]), []).append(row["ratio"])
for (task, peer), found in sorted(ratios.items()):
    mean = math.exp(sum(map(math.log, found)) / len(found))
    print(f"{task:28} {peer:10} {mean:7.2f} x over {len(found)} workloads")
END
say "written: $folder"
exit $failed
