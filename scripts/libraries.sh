#!/usr/bin/env bash
# The recipes for other libraries, with the real packages, which are downloaded: about 130 MB. Needs no GPU.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
cd "$root"

prepare test torch numpy rich typer cuda.core pytest matplotlib
venv_beside build/libraries
"$python" -m pip --python build/libraries/bin/python install --quiet transformers diffusers monai lightning accelerate
PYTHONPATH=src build/libraries/bin/python -m pytest -q -m slow tests/test_libraries.py
