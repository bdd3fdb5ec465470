#!/usr/bin/env bash
# All that needs a GPU: the last word on correctness, and the records in benchmarks/results.
#
#   scripts/gpu.sh                        everything, in the order below
#   scripts/gpu.sh tests fuzz             some of it
#   scripts/gpu.sh forward gradients picture tables
#
# $LAYERS and $SEED are those of random, 48 and 1.
#
# Every stage is run, whatever became of those before it, under a limit of $LIMIT seconds (3600). What a stage prints also
# goes to build/gpu/STAGE.log. The last lines say what each came to; the exit status is 1 if one failed.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
cd "$root"

STAGES=(
  tests fuzz sanitizer examples docs host
  forward gradients channels_last gradients_channels_last models strict random holes planner planner_models emitted
  blocks block_bytes whole_models picture tables
)
command -v nvidia-smi > /dev/null || { echo "there is no NVIDIA GPU: nvidia-smi is missing" >&2; exit 2; }
# "NVIDIA H200" is h200, "NVIDIA GeForce RTX 4090" geforce-rtx-4090.
card=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | sed 's/^NVIDIA //' | tr 'A-Z ' 'a-z-')
RESULTS=benchmarks/results/$card

bench() { "$python" -m polyphase bench "$@"; }
record() { bench --csv "$RESULTS$1.csv" --dtypes float32,bfloat16 --against default,benchmark "${@:2}"; }

tests() { # those that want the GPU for themselves by one process
  local shared=0
  scripts/test.sh --every tests --ignore tests/test_fuzz.py --ignore tests/test_sanitizer.py -q || shared=$?
  "$python" -m pytest tests -m alone -q && return "$shared"
}
fuzz() { scripts/test.sh tests/test_fuzz.py --cases 2000 -k cuda -q; }
sanitizer() { scripts/test.sh --every tests/test_sanitizer.py -q; }
examples() { scripts/check.sh examples/*.py; }
docs() { # their code, on the GPU, and a page of `report`; what `tune` measures there is not for the other stages
  export POLYPHASE_CACHE_DIR=$root/build/gpu/docs
  "$python" scripts/snippets.py README.md docs/index.md docs/reference.md docs/guides/*.md docs/tutorials/*.md
  "$python" -m polyphase report examples/tuple_parameters.py --output build/gpu/report.html
}
host() { bench --host --csv "$RESULTS-host.csv"; }
forward() { record '' --suite all; }
gradients() { record -gradients --quick --suite all --passes input_grad,weight_grad; }
channels_last() { record -channels-last --quick --suite all --layouts channels_last; }
gradients_channels_last() {
  record -gradients-channels-last --quick --suite all --layouts channels_last --passes input_grad,weight_grad
}
models() { record -models --quick --suite models; }
strict() { bench --suite kernelbench --strict-fp32 --quick --csv "$RESULTS-strict.csv"; }
random() { bench --random "${LAYERS:-48}" --seed "${SEED:-1}" --csv "$RESULTS-random.csv"; }
holes() { bench --graphs --suite holes,batch1,volumes --csv "$RESULTS-holes.csv"; }
planner() { # its choices beside all candidates; what was measured is not for the other stages
  local suite=${1:-all}
  POLYPHASE_CACHE_DIR=$root/build/gpu/planner "$python" -m polyphase tune --suite "$suite" --dtypes float32,bfloat16 \
    --csv "$RESULTS-tune${1:+-$1}.csv"
}
planner_models() { planner models; }
emitted() { "$python" benchmarks/emitted.py; }
blocks() { "$python" benchmarks/blocks.py --seconds 3000 --csv "$RESULTS-blocks-compiled.csv"; }
block_bytes() { "$python" benchmarks/block_bytes.py --csv "$RESULTS-block-bytes.csv"; } # by Nsight Compute
whole_models() { "$python" benchmarks/models.py --seconds 3000 --csv "$RESULTS-whole-models.csv"; }
picture() {
  bench --plot-from "$RESULTS.csv" --plot-from "$RESULTS-gradients.csv" --png "$RESULTS.png"
}
tables() { # of the docs, whose record is an H200's
  if [[ $RESULTS == */h200 ]]; then "$python" benchmarks/tables.py && "$python" benchmarks/picture.py; fi
}

prepare test torch numpy rich typer cuda.core pytest matplotlib
export -f bench record "${STAGES[@]}"
export root python RESULTS

(($#)) || set -- "${STAGES[@]}"
for stage in "$@"; do
  [[ " ${STAGES[*]} " == *" $stage "* ]] || { echo "there is no stage $stage, but ${STAGES[*]}" >&2; exit 2; }
done
mkdir -p build/gpu
told=()
failed=0
for stage in "$@"; do
  SECONDS=0
  printf '\n== %s ==\n' "$stage"
  if timeout "${LIMIT:-3600}" bash -c "$stage" 2>&1 | tee "build/gpu/$stage.log"; then
    status=0
  else
    status=${PIPESTATUS[0]} failed=1
  fi
  told+=("$(printf '%-14s exit status %3d  %5d s' "$stage" "$status" "$SECONDS")")
done
printf '\n'
printf '%s\n' "${told[@]}"
exit "$failed"
