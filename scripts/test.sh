#!/usr/bin/env bash
# The tests, and all the set-up that they need. They use the GPU where there is one.
#
#   scripts/test.sh                                   all of them
#   scripts/test.sh tests/test_fuzz.py --cases 2000   some of them, with pytest's options
set -euo pipefail
source "$(dirname "$0")/environment.sh"
cd "$root"

prepare test torch numpy rich typer cuda.core pytest matplotlib
# Without a GPU the processor is shared out: as many processes of one thread each as it has cores.
if ! nvidia-smi > /dev/null 2>&1 && "$python" -c "import xdist" 2> /dev/null; then
  set -- --numprocesses "$(getconf _NPROCESSORS_ONLN)" "$@"
  export OMP_NUM_THREADS=1
fi
exec "$python" -m pytest "$@"
