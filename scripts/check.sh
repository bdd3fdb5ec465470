#!/usr/bin/env bash
# The main job, and all the set-up that it needs: model files with polyphase and without, compared and timed.
#
#   scripts/check.sh examples/*.py                    the five reference models
#   scripts/check.sh my_model.py --dtype bfloat16     a model of yours; --help lists the options
set -euo pipefail
source "$(dirname "$0")/environment.sh"

prepare cli torch rich typer
exec "$python" -m polyphase check "$@"
