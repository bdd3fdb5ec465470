#!/usr/bin/env bash
# Every candidate predicted at up to 1.35 times the best, of the 21 layers in channels_last: layers.sh FILE. Needs a GPU.
set -euo pipefail
python -m polyphase tune --suite all --layouts channels_last --passes forward,input_grad,weight_grad \
    --dtypes float32 --within 1.35 --csv "$1"
python -m polyphase tune --forget
