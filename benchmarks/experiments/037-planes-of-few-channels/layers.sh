#!/usr/bin/env bash
# Input gradients of layers of few output channels: layers.sh FILE. Needs a GPU.
set -euo pipefail
python -m polyphase tune --passes input_grad --dtypes float32,bfloat16 --within 2 --csv "$1" \
    --kernels tap_gemm_tma,window_dgrad_mma,direct_tiled,window_dgrad_wgmma \
    --layer '8x56x270x480 -> 1, k=9, s=4, p=4, op=3, bias' --layer '8x56x270x480 -> 4, k=9, s=4, p=4' \
    --layer '64x768x7x7x7 -> 4, k=5, p=2' --layer '4x768x46x46x46 -> 3, k=4, s=2, p=1'
python -m polyphase tune --forget
