#!/usr/bin/env bash
# Two commits of polyphase on one GPU, in turn: every pass of the record's 22 layers in float32 and bfloat16, both formats.
#
#   run.sh BEFORE AFTER OUT      two checkouts, and a folder for before.csv and after.csv
set -euo pipefail
before=$(realpath "$1") after=$(realpath "$2") out=$(realpath "$3")

bench() { # CHECKOUT NAME
  (cd "$1" && PYTHONPATH=$1/src POLYPHASE_CACHE_DIR=${TMPDIR:-/tmp}/polyphase-$2 python3 -m polyphase bench --suite all --quick \
    --passes forward,input_grad,weight_grad --dtypes float32,bfloat16 --layouts nchw,channels_last --csv "$out/$2.csv")
}
# First both at once, so that kernels and plans are on disk; then each alone, and these figures count.
bench "$before" before > "$out/before.log" 2>&1 &
bench "$after" after > "$out/after.log" 2>&1 &
wait
for repetition in 1 2; do
  bench "$before" before
  bench "$after" after
done
