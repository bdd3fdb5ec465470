#!/usr/bin/env bash
# The input gradients of this experiment: layers.sh CSV; needs a Hopper GPU. PYTHONPATH names the checkout.
python -m polyphase bench --passes input_grad --dtypes float32,bfloat16 --quick --csv "$1" \
  --layer '16x512x32768 -> 1, k=4, s=2, p=1' --layer '32x512x2561 -> 3, k=8, s=4, p=2' \
  --layer '32x256x160x160 -> 12, k=5, s=2, p=2, op=1, g=4' --layer '16x64x16x16x16 -> 256, k=4, s=2, p=1' \
  --layer '2x64x168x224 -> 64, k=7, s=2, p=3, op=1' --layer '8x56x270x480 -> 1, k=9, s=4, p=4, op=3' \
  --layer '16x192x137x183 -> 192, k=4, s=2, p=1' --layer '128x128x32x32 -> 3, k=4, s=2, p=1' \
  --layer '16x64x256x256 -> 3, k=4, s=2, p=1' --layer '8x64x256x256 -> 3, k=7, p=3' \
  --layer '2x32x28x28 -> 1024, k=9, s=4, p=4' --layer '128x24x16x128 -> 384, k=3, p=1'
