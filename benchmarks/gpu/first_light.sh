#!/usr/bin/env bash
# Run the CUDA code on a GPU for the first time, in seven stages of ten minutes together, without a network.
#
#   benchmarks/gpu/first_light.sh FOLDER [STAGE] [OPTIONS]
#
# A second call with the same FOLDER goes on where the first one ended; STAGE, a name or a number from 1 to 7,
# begins there. `keyedopt.benchmarks.gpu.first_light` has the options and the exit codes.
# PYTHON names the interpreter (default: python3). It needs torch. BUNDLE is the folder that
# `python -m keyedopt.tools.gpu_bundle` made (default: `bundle` beside this script); without it, keyedopt and all
# packages must be installed.
set -eu
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
bundle=${BUNDLE:-$here/bundle}
if [ -d "$bundle" ]; then
    site=${KEYEDOPT_FIRST_LIGHT_SITE:-/tmp/first-light-site-$(id -u)}
    "$python" "$here/unpack_bundle.py" "$bundle" "$site"
    . "$site/environment.sh"
fi
exec "$python" -m keyedopt.benchmarks.gpu.first_light "$@"
