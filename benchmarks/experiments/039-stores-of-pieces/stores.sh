#!/usr/bin/env bash
# Times forward passes of a checkout: stores.sh CHECKOUT FILE, with the layers of LAYERS (a file of one a line).
set -euo pipefail
layers=()
while read -r layer; do layers+=(--layer "$layer"); done < "${LAYERS:?a file of layers}"
PYTHONPATH=$1/src exec python3 -m polyphase bench --quick --passes forward --dtypes float32,bfloat16 --csv "$2" "${layers[@]}"
