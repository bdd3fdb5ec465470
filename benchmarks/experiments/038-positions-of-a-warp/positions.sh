#!/usr/bin/env bash
# Times weight gradients of few channels, for experiment 038: positions.sh FILE. Needs a GPU.
set -euo pipefail
python -m polyphase tune --csv "$1" --passes weight_grad --kernels direct_wgrad_channels --dtypes float32,bfloat16 \
  --within 3 \
  --layer "8x64x25x25x25 -> 128, k=6, s=2, g=64" \
  --layer "8x192x7x7x7 -> 192, k=8, s=4, p=2, g=192" \
  --layer "32x96x10x10x10 -> 192, k=(1, 9, 9), s=(1, 4, 4), p=(0, 4, 4), op=(0, 3, 3), g=96" \
  --layer "16x128x64x64 -> 128, k=4, s=2, p=1, g=128" \
  --layer "8x96x112x112 -> 96, k=3, s=2, p=1, op=1, g=96" \
  --layer "4x64x168x168 -> 64, k=7, s=2, p=3, g=16, bias" \
  --layer "32x64x33x47 -> 64, k=5, s=2, p=2, g=64"
