#!/usr/bin/env bash
# The input gradients of this experiment: layers.sh CSV; needs a Hopper GPU. PYTHONPATH names the checkout.
python -m polyphase tune --passes input_grad --dtypes float32,bfloat16 --kernels tap_gemm_tma,window_dgrad_transposed \
  --within 1.5 --csv "$1" \
  --layer '16x512x32768 -> 1, k=4, s=2, p=1' --layer '4x1024x117x117 -> 24, k=2, s=2' \
  --layer '32x256x160x160 -> 12, k=5, s=2, g=4' --layer '16x192x137x183 -> 192, k=4, s=2' \
  --layer '16x768x16x67 -> 384, k=3, s=3' --layer '128x256x8192 -> 16, k=4, s=2, p=1' \
  --layer '16x128x7x7x7 -> 128, k=(5, 3, 3), p=(2, 1, 1)' --layer '8x96x127x127 -> 64, k=4, s=2, p=1' \
  --layer '8x64x128x128 -> 3, k=4, s=2, p=1'
