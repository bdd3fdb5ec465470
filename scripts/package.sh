#!/usr/bin/env bash
# Wheel and sdist, in dist/: built, checked, and the wheel installed into a new environment, where the code of README and
# of the first guides runs.
#
#   scripts/package.sh           as CI does
#   scripts/package.sh URL       for a release: URL is the repository's address on the web, where README's links lead
#
# The new environment finds PyTorch and other requirements where this one has them; nothing is downloaded into it.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
cd "$root"

prepare dev torch rich typer cuda.core build twine
work=$root/build/package
rm -rf "$work" dist
mkdir -p "$work/source"

"$python" scripts/package_source.py "$work/source" "$@"
"$python" -m build --no-isolation --outdir dist "$work/source" > "$work/build.log" 2>&1 ||
  { cat "$work/build.log" >&2; exit 1; }
"$python" -m twine check --strict dist/*
# Every file of the package is in the wheel.
diff <(cd "$work/source/src" && find polyphase -type f | sort) \
  <("$python" -m zipfile --list dist/*.whl | awk '$1 ~ /^polyphase\// {print $1}' | sort)

venv_beside "$work/venv"
# Alone at first: what is installed from a checkout lies on the path too, and has the same version.
"$python" -m pip --python "$work/venv/bin/python" install --quiet --no-index --no-deps --force-reinstall dist/*.whl
"$python" -m pip --python "$work/venv/bin/python" install --quiet --no-index "torch-polyphase[cli]"
cd "$work"
unset PYTHONPATH
venv/bin/python -c '
import polyphase, sys
assert polyphase.__file__.startswith(sys.prefix), polyphase.__file__'
venv/bin/polyphase --version
# As a newcomer: README, the quick start, and the export of an accelerated model.
venv/bin/python "$root/scripts/snippets.py" "$root"/{README.md,docs/index.md,docs/guides/export.md}
