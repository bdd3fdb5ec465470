#!/usr/bin/env bash
# Both gradients of this experiment: layers.sh CSV; needs a Hopper GPU. PYTHONPATH names the checkout.
python -m polyphase tune --passes input_grad,weight_grad --dtypes float32 --within 1.3 --csv "$1" --suite all \
  --kernels window_dgrad_transposed,window_wgrad_transposed,window_dgrad_wgmma,window_wgrad_wgmma,tap_gemm_tma,implicit_gemm,tap_gemm_wgrad_tma \
  --layer '128x512x8x8 -> 256, k=4, s=2, p=1' --layer '16x512x64x64 -> 256, k=2, s=2, bias' \
  --layer '16x1024x8x8 -> 512, k=4, s=2, p=1' --layer '16x128x16x16x16 -> 64, k=4, s=2, p=1' \
  --layer '8x64x64x64 -> 64, k=8, s=4, p=2, bias' --layer '8x768x64x64 -> 384, k=2, s=2, bias' \
  --layer '16x256x2048 -> 128, k=16, s=8, p=4, bias' --layer '4x1536x86 -> 768, k=16, s=8, p=4, bias' \
  --layer '8x48x96x96x96 -> 24, k=3' --layer '1x256x16x32x32 -> 128, k=(3, 4, 4), s=(1, 2, 2), p=1' \
  --layer '2x128x32x32x32 -> 64, k=3, s=2, p=1, op=1, bias' --layer '8x1026x12x16 -> 256, k=4, s=2, p=1' \
  --layer '16x96x96x96 -> 96, k=4, s=2, p=1' --layer '4x512x24x24 -> 256, k=7, s=2' \
  --layer '16x128x222x111 -> 384, k=3, s=2, p=1, op=1, bias' --layer '4x1024x117x117 -> 24, k=2, s=2' \
  --layer '4x64x256x256 -> 384, k=3, d=2, bias' --layer '10x512x7x7 -> 512, k=5, p=2, bias' \
  --layer '16x512x24x32 -> 256, k=7, s=3' --layer '8x384x56x56 -> 768, k=4, s=2, p=1'
