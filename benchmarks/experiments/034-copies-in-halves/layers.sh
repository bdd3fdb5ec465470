#!/usr/bin/env bash
# The forward passes of this experiment: layers.sh CSV; needs a Hopper GPU. PYTHONPATH names the checkout.
python -m polyphase tune --dtypes float32 --within 1.3 --csv "$1" \
  --kernels implicit_gemm_transposed,implicit_gemm,tap_gemm_tma,phase_gemm_pixels \
  --layer '128x1024x4x4 -> 512, k=4, s=2, p=1' --layer '128x512x8x8 -> 256, k=4, s=2, p=1' \
  --layer '128x256x16x16 -> 128, k=4, s=2, p=1' --layer '16x1024x32x32 -> 512, k=2, s=2, bias' \
  --layer '16x512x64x64 -> 256, k=2, s=2, bias' --layer '64x256x32x24 -> 256, k=4, s=2, p=1' \
  --layer '8x48x64x64x64 -> 48, k=3' --layer '64x64x128x256 -> 128, k=(3, 5)' \
  --layer '1x4096x32x32 -> 4096, k=3, s=2, g=8' --layer '16x1024x8x8 -> 512, k=4, s=2, p=1' \
  --layer '16x128x16x16x16 -> 64, k=4, s=2, p=1' --layer '8x64x64x64 -> 64, k=8, s=4, p=2, bias' \
  --layer '8x64x32x32 -> 64, k=12, s=8, p=2, bias' --layer '8x768x64x64 -> 384, k=2, s=2, bias' \
  --layer '16x256x2048 -> 128, k=16, s=8, p=4, bias' --layer '8x256x1200 -> 128, k=10, s=5, bias' \
  --layer '4x1536x86 -> 768, k=16, s=8, p=4, bias' --layer '8x48x96x96x96 -> 24, k=3' \
  --layer '1x256x16x32x32 -> 128, k=(3, 4, 4), s=(1, 2, 2), p=1' --layer '4x240x4x32x32 -> 240, k=4, s=2, p=1, bias' \
  --layer '2x128x32x32x32 -> 64, k=3, s=2, p=1, op=1, bias' --layer '8x1026x12x16 -> 256, k=4, s=2, p=1' \
  --layer '8x256x64x64 -> 128, k=3, s=2, p=1, op=1, bias' --layer '16x96x96x96 -> 96, k=4, s=2, p=1' \
  --layer '4x512x207x207 -> 384, k=3, s=3, bias' --layer '16x128x222x111 -> 384, k=3, s=2, p=1, op=1, bias' \
  --layer '1x128x48x12x24 -> 128, k=4, s=2, p=1' --layer '128x128x100 -> 150, k=8, s=4, p=2, bias' \
  --layer '4x64x256x256 -> 384, k=3, d=2, bias' --layer '8x768x6x6x6 -> 768, k=3, s=2, p=1' \
  --layer '10x512x7x7 -> 512, k=5, p=2, bias' --layer '64x64x224x210 -> 64, k=4, s=2, p=1, bias' \
  --layer '10x128x79x79 -> 64, k=3, s=5, d=2, bias'
