#!/usr/bin/env bash
# The gallery: checks every implementation that is installed, measures nothing, and makes the page of it.
#
#   reports/gallery.sh [--output FOLDER] [RESULT.json ...]
#
# Writes FOLDER/results, FOLDER/site/index.html, FOLDER/torchrec-A-to-B.md (what changed from one torchrec to the next)
# and, where Chromium is installed, FOLDER/overview.png and FOLDER/matrix.png. A result given as an argument is shown
# too; one of another torchrec stands in for the environments that are made otherwise. Results that are in FOLDER
# already are not made again. COMMIT_URL, with {commit} in it, links the steps of the history to their commits.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=gallery
if [ "${1:-}" = --output ]; then out=${2:?--output asks for a folder}; shift 2; fi
python=${PYTHON:-python3}
# Other versions of torchrec than the one that is installed, with their torch and FBGEMM.
others=("1.6.1 2.11.0 1.6.0" "1.9.2 2.14.1 1.9.0")
mkdir -p "$out/results"
given=()
for file in "$@"; do given+=("$(realpath -- "$file")"); done
cd "$out"

# Checks one; exit code 1 is a verdict, which the page shows; more than that is no result.
check() {
    local file=$1
    shift
    if [ -e "$file" ]; then echo "there already: $file"; return; fi
    "$@" --output "$file" || if [ $? -ne 1 ]; then echo "left out: no result of $*"; rm -f "$file"; fi
}

version=$("$python" -c 'from importlib.metadata import version; print(version("torchrec"))' 2> /dev/null || echo none)
for name in reference fused torch fbgemm torchft torchrec; do
    known=() file=results/$name.json
    if [ -e "$root/conformance/expectations/$name.toml" ]; then known=(--expectations "$name"); fi
    if [ "$name" = torchrec ]; then file=results/torchrec-$version.json; fi
    check "$file" "$python" -m keyedopt.cli.main check "$name" "${known[@]}"
done

# Says whether one of some files is a result of torchrec; what is no result at all is named by the report.
has_torchrec() {
    "$python" - "$@" << 'END'
import json, sys

def name(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)["implementation"]["name"]
    except (OSError, ValueError, LookupError, TypeError):
        return None

sys.exit("torchrec" not in map(name, sys.argv[1:]))
END
}

# Other versions, each in an environment of its own.
if has_torchrec "${given[@]}"; then
    echo "no other torchrec is installed: a result of torchrec is given"
    others=()
fi
for each in "${others[@]}"; do
    read -r version torch fbgemm <<< "$each"
    file=results/torchrec-$version.json env=env-$version
    if [ -e "$file" ]; then echo "there already: $file"; continue; fi
    if { [ -x "$env/bin/pip" ] || "$python" -m venv "$env"; } &&
        "$env/bin/pip" install --quiet "$root" "torch==$torch" "fbgemm-gpu-cpu==$fbgemm" &&
        "$env/bin/pip" install --quiet --no-deps "torchrec==$version" &&
        "$env/bin/pip" install --quiet tensordict torchmetrics==1.0.3 pyre-extensions tqdm; then
        check "$file" env -u PYTHONPATH "$env/bin/keyedopt" check torchrec --expectations torchrec
    else
        echo "left out: torchrec $version, as it cannot be installed here; give a result of it as an argument"
    fi
done

# What lies beside the results of benchmarks (stored ratios of the gate, trials of it) is no result.
mapfile -t speeds < <(find "$root/benchmarks/results" -name '*.json' -not -path '*/trials/*')
"$python" -m keyedopt.cli.main report results "${given[@]}" "${speeds[@]}" --output site \
    --format html --format markdown --format badge --format csv --plots ${COMMIT_URL:+--commit-url "$COMMIT_URL"}

# From each torchrec to the next.
before=
for version in $(find results -name 'torchrec-*[0-9].json' | sed 's|.*/torchrec-||; s|\.json$||' | sort -V); do
    if [ -n "$before" ]; then
        "$python" -m keyedopt.cli.main diff "results/torchrec-$before.json" "results/torchrec-$version.json" \
            --format markdown > "torchrec-$before-to-$version.md" || [ $? -eq 1 ]
    fi
    before=$version
done

browser=${CHROMIUM:-$(command -v chromium || command -v google-chrome || true)}
if [ -z "$browser" ]; then
    echo "left out: the pictures, as there is no Chromium"
    exit
fi
for view in overview matrix; do
    "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1400,1000 \
        --virtual-time-budget=5000 --screenshot="$view.png" "file://$PWD/site/index.html#$view" 2> /dev/null
    # Few colours: a quarter of the size.
    "$python" - "$view.png" << 'END'
import sys
from PIL import Image

with Image.open(sys.argv[1]) as image:
    image.convert("RGB").quantize(128).save(sys.argv[1], optimize=True)
END
done
echo "written: $out/site/index.html, $out/overview.png, $out/matrix.png"
