#!/usr/bin/env bash
# What the working tree does to machine code and to plans, beside a commit. Needs no GPU. The exit status is 1 if anything
# differs, which is right where a change is meant, and else a mistake.
#
#   scripts/gates.sh [COMMIT]          a part of both, about a minute and a half; without a commit, beside HEAD
#   scripts/gates.sh --all [COMMIT]    every suite, dtype and format, and 300 random layers: half an hour
#
# Files are left in build/gates. Those of a commit are made once. Renames of algorithms, for one, can be left out of a
# comparison: python -m polyphase diff build/gates/COMMIT-part-plans.csv build/gates/part-plans.csv --names FILE
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
prepare cli,cu13 torch rich typer cuda.core cuda.bindings

part=part
[[ ${1:-} == --all ]] && part=all && shift
commit=$(git rev-parse --short=12 "${1:-HEAD}^{commit}")
folder=$root/build/gates
mkdir -p "$folder"

# These three have kernels of all files but one: groups, wide strides to a single channel, kernel = stride.
layers=(
  --layer "16x32x128x256 -> 64, k=(3, 5), s=(2, 3), p=(1, 2), d=(2, 1), g=4"
  --layer "8x56x270x480 -> 1, k=9, s=4, p=4, op=3, bias"
  --layer "16x128x256x256 -> 64, k=2, s=2, bias"
)

# write SOURCE NAME: digests and plans of the package in SOURCE, into NAME-digests.csv and NAME-plans.csv.
write() {
  local source=$1 name=$2
  if [[ $part == all ]]; then
    PYTHONPATH=$source "$python" -m polyphase compile --suite all --dtypes float32,bfloat16 --arch sm_90a \
      --digests "$name-digests.csv"
    PYTHONPATH=$source "$python" -m polyphase compile --suite reference --dtypes float32 --layouts nchw \
      --arch sm_80,sm_100a,sm_120 --digests "$name-others-digests.csv"
    tail -n +2 "$name-others-digests.csv" >> "$name-digests.csv"
    rm "$name-others-digests.csv"
    PYTHONPATH=$source "$python" -m polyphase plans --suite reference,kernelbench,all,models --random 600 \
      --csv "$name-plans.csv"
  else
    PYTHONPATH=$source "$python" -m polyphase compile "${layers[@]}" --dtypes float32,bfloat16 --layouts nchw \
      --arch sm_90a --digests "$name-digests.csv"
    PYTHONPATH=$source "$python" -m polyphase plans --suite reference --random 60 --csv "$name-plans.csv"
  fi
}

before=$folder/$commit-$part after=$folder/$part
if [[ ! -f $before-plans.csv ]]; then
  tree=$(mktemp -d)
  trap 'rm -rf "$tree"' EXIT
  git archive "$commit" src | tar -x -C "$tree"
  if [[ ! -f $tree/src/polyphase/commands/diff.py ]]; then
    echo "$commit is older than the gates" >&2
    exit 2
  fi
  write "$tree/src" "$before" > "$before.log"
fi
write "$root/src" "$after" > "$after.log"
status=0
for kind in digests plans; do
  printf '%s: ' "$kind"
  "$python" -m polyphase diff "$before-$kind.csv" "$after-$kind.csv" || status=1
done
exit "$status"
