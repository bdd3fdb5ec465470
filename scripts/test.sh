#!/usr/bin/env bash
# The tests, and all the set-up that they need. They use the GPU where there is one.
#
#   scripts/test.sh                                   all but the slow ones
#   scripts/test.sh --all                             the slow ones too, as CI does
#   scripts/test.sh --every                           and every case of those that are sampled
#   scripts/test.sh tests/test_fuzz.py --cases 2000   some of them, with pytest's options
set -euo pipefail
source "$(dirname "$0")/environment.sh"
cd "$root"

prepare test torch numpy rich typer cuda.core pytest matplotlib
# With pytest-xdist the processor is shared out, as many processes of one thread each as it has cores; and the memory of
# a GPU, 8 GiB for each of them.
if "$python" -c "import xdist" 2> /dev/null; then
  processes=$(getconf _NPROCESSORS_ONLN)
  memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2> /dev/null | head -n 1) || memory=
  if [[ $memory =~ ^[0-9]+$ ]]; then
    fitting=$((memory / 8192 > 0 ? memory / 8192 : 1))
    processes=$((processes < fitting ? processes : fitting))
  fi
  set -- --numprocesses "$processes" "$@"
  export OMP_NUM_THREADS=1
fi
exec "$python" -m pytest "$@"
