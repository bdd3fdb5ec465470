#!/usr/bin/env bash
# Times all candidates of tap_gemm_tma for layers that the planner gives to it: `tune.sh forward`, `tune.sh input-gradient`.
set -euo pipefail
cd "$(dirname "$0")"

forward=(
  "6x512x56x4x32 -> 50, k=3, s=(4, 2, 2), p=1, op=(0, 1, 1)" "16x768x32x32 -> 256, k=5, s=3"
  "32x21x64x64 -> 18, k=7, s=3, p=3" "4x64x16x16x16 -> 320, k=(3, 7, 7), s=(2, 3, 3), p=(0, 3, 3)"
  "4x512x5x13x10 -> 256, k=3, s=3" "8x384x9111 -> 192, k=4, p=2" "128x256x32x32 -> 256, k=5, d=3, g=4"
  "2x512x175x14 -> 256, k=3, p=2, d=2" "64x768x8x8 -> 384, k=5" "4x32x48x48x48 -> 32, k=4, s=2, p=1, g=2"
  "16x384x8583 -> 192, k=4, s=2, p=1" "8x513x128x128 -> 21, k=5, s=2, p=2, op=1"
)
gradient=(
  "6x512x56x4x32 -> 50, k=3, s=(4, 2, 2), p=1, op=(0, 1, 1)" "1x64x20x80x40 -> 32, k=8, s=4, p=2"
  "32x21x64x64 -> 18, k=7, s=3, p=3" "64x768x7x7x7 -> 4, k=5, p=2" "8x384x9111 -> 192, k=4, p=2"
  "16x18x256x256 -> 9, k=(4, 1), s=(2, 1), p=(1, 0)" "16x384x8583 -> 192, k=4, s=2, p=1"
  "16x29x32x32x32 -> 80, k=3, s=2, p=1" "64x384x34x138 -> 2, k=4, p=2" "8x75x224x224 -> 3, k=3, s=2, p=1"
  "4x768x46x46x46 -> 3, k=4, s=2, p=1" "128x256x32x32 -> 256, k=5, d=3, g=4"
)
passes=forward layers=("${forward[@]}")
[[ ${1:-forward} == input-gradient ]] && passes=input_grad layers=("${gradient[@]}")
PYTHONPATH=../../../src python -m polyphase tune "${layers[@]/#/--layer=}" --passes "$passes" --dtypes float32,bfloat16 \
  --kernels tap_gemm_tma --csv "${1:-forward}.csv"
