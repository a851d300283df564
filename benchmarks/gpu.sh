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
# Writes summary.json, and prints it as a table, from the files that there are; $1 says why there may be none.
summary() {
    "$python" - "$folder" "$1" "$missing" <<'END'
import json, math, pathlib, sys

folder, why, missing = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3].split()
ratios, checks, verdicts = {}, [], {}
for path in sorted(folder.glob("*.json")):
    if path.name == "summary.json":
        continue
    report = json.loads(path.read_text())
    checks += report.get("checks", [])
    if path.stem.startswith("conformance"):
        outcomes = [case["outcome"] for case in report["cases"]]
        verdicts[path.stem] = {one: outcomes.count(one) for one in sorted(set(outcomes))}
    for row in report.get("rows", []):
        if row["matches"]:
            ratios.setdefault((row["task"], row["peer"]), []).append(row["ratio"])
means = [
    {"task": task, "peer": peer, "ratio": math.exp(sum(map(math.log, found)) / len(found)), "workloads": len(found)}
    for (task, peer), found in sorted(ratios.items())
]
summary = {"kind": "keyedopt-gpu", "why": why, "missing": missing, "conformance": verdicts, "checks": checks}
(folder / "summary.json").write_text(json.dumps({**summary, "ratios": means}, indent=1) + "\n")
for name, counts in verdicts.items():
    print(f"{name:28} " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
for row in checks:
    if row["outcome"] != "held":
        print(f"{row['check']:28} {row['algorithm']:20} {row['outcome']}: {row['message']}")
for row in means:
    print(f"{row['task']:28} {row['peer']:10} {row['ratio']:7.2f} x over {row['workloads']} workloads")
END
}

missing=
if ! "$python" -c "import torch; torch.empty(1, device='cuda')" 2>/dev/null; then
    echo "CUDA: torch cannot use it here; nothing to measure"
    missing=cuda
    summary "torch cannot use CUDA here"
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
        missing="$missing ${pair%:*}"
    fi
done

# One backend after the other; what a backend refuses, `auto` gives to the next. The times add up to 10 minutes.
conformance() {
    local backend=$1 limit=$2 code
    shift 2
    say "conformance on CUDA, $backend"
    KEYEDOPT_BACKEND=$backend timeout -k 5 "$limit" "$python" -m keyedopt.cli.main check "$target" --device cuda \
        --output "$folder/conformance-$backend.json" "$@" >"$folder/conformance-$backend.txt" 2>&1
    code=$?
    tail -n 3 "$folder/conformance-$backend.txt"
    [ $code -eq 0 ] || { echo "exit $code; see $folder/conformance-$backend.txt"; failed=1; }
}
backed=(--area fused --area accumulate --area sparse --area in_backward --dtype float32)
case " $missing " in *" triton "*) ;; *) conformance triton 140 ;; esac
conformance torch 50 "${backed[@]}"
case " $missing " in *" fbgemm "*) ;; *) conformance fbgemm 50 "${backed[@]}" ;; esac
proof=()
[ -f "$folder/conformance-triton.json" ] && proof=(--conformance "$folder/conformance-triton.json")

say "steps that do not wait, graphs, first steps"
timeout -k 5 60 "$python" -m keyedopt.benchmarks.gpu_checks --implementation "$target" \
    --output "$folder/checks.json" 2>&1 | tee "$folder/checks.txt"
[ "${PIPESTATUS[0]}" -eq 0 ] || failed=1

# A process for each part, so that one that breaks costs its own part alone.
part() {
    local name=$1 limit=60
    shift
    [ "$name" = tables ] || [ "$name" = backward ] && limit=90
    say "$name against $peers"
    timeout -k 5 "$limit" "$python" -m keyedopt.cli.main bench --implementation "$target" --device cuda \
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

say "geometric means of the ratios whose results match, verdicts, and checks that did not hold"
summary ""
say "written: $folder"
exit $failed
