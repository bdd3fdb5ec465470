#!/usr/bin/env bash
# The recipes for other libraries, with the real packages, which are downloaded. Needs no GPU.
#
#   scripts/libraries.sh          those that need PyTorch alone, beside this environment's: about 130 MB
#   scripts/libraries.sh --all    and those that need torchvision or a C++ compiler, in an environment of their own, whose
#                                 PyTorch is the one that pip chooses for torchvision: gigabytes, where that is for CUDA
#
# $TORCH_INDEX is the address of PyTorch's index of CPU wheels.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
cd "$root"

prepare test torch numpy rich typer cuda.core pytest matplotlib
libraries=(transformers diffusers monai lightning accelerate)
if [[ ${1:-} == --all ]]; then
  folder=build/all-libraries
  "$python" -m venv "$folder"
  "$folder/bin/pip" install --quiet torch torchvision ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
  "$folder/bin/pip" install --quiet ".[test]" "${libraries[@]}" timm segmentation-models-pytorch kernels
  # Built from source, by what is in the environment.
  "$folder/bin/pip" install --quiet setuptools wheel ninja
  "$folder/bin/pip" install --quiet --no-build-isolation deepspeed
else
  folder=build/libraries
  venv_beside "$folder"
  "$python" -m pip --python "$folder/bin/python" install --quiet "${libraries[@]}"
fi
# DeepSpeed calls what is beside its Python.
PATH=$PWD/$folder/bin:$PATH PYTHONPATH=src "$folder/bin/python" -m pytest -q -m slow tests/test_libraries.py
