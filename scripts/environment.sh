# Sourced by the other scripts. `prepare EXTRA MODULE...` leaves in $python an interpreter that runs polyphase from this
# checkout, with its tools on the PATH.
#
# Where python3 (or $PYTHON) can import the modules already, it is taken as it is and nothing is installed: an
# environment that is active, or a GPU machine with a PyTorch of its own and no network. Else .venv is made and filled
# with the package and its EXTRA, and taken from then on where $PYTHON is not set.

# The PyTorch of machines that have neither one nor an NVIDIA GPU. Pinned, as the newest one may come for CUDA alone,
# gigabytes of it, where this one can be had for the CPU.
CPU_TORCH=2.13.0

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

prepare() {
  local extra=$1 base=${PYTHON:-python3}
  shift
  if ! command -v "$base" > /dev/null; then
    echo "there is no $base; name a Python in \$PYTHON" >&2
    exit 1
  fi
  if [[ -n ${PYTHON:-} || ! -d $venv ]] && can_import "$base" "$@"; then
    python=$(command -v "$base")
    export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
  else
    python=$venv/bin/python
    # What was installed last is remembered by its pyproject.toml: dependencies that change are installed again.
    local installed=$venv/polyphase-$extra.toml
    if ! cmp --silent "$root/pyproject.toml" "$installed"; then
      make_venv "$base"
      "$python" -m pip install --editable "${root}[$extra]"
      cp "$root/pyproject.toml" "$installed"
    fi
  fi
  PATH=$(dirname "$python"):$PATH
}

make_venv() {
  local base=$1
  if [[ ! -x $python ]]; then
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10) and "polyphase needs Python 3.10 or newer, but " \
      + sys.executable + " is " + sys.version.split()[0] + "; name another one in $PYTHON")'
    if can_import "$base" torch; then # gigabytes that need not be downloaded
      "$base" -m venv --system-site-packages "$venv"
      # What a virtual environment of its own has is not the system's.
      "$base" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' \
        > "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
    else
      "$base" -m venv "$venv"
    fi
  fi
  if ! can_import "$python" torch && ! nvidia-smi > /dev/null 2>&1; then
    "$python" -m pip install "torch==$CPU_TORCH"
  fi
}

# Whether an interpreter is new enough, and can import these modules, a PyTorch that is new enough among them.
can_import() {
  "$1" - "${@:2}" > /dev/null 2>&1 << 'END'
import importlib, sys

modules = {name: importlib.import_module(name) for name in sys.argv[1:]}
torch_version = tuple(map(int, modules["torch"].__version__.split(".")[:2]))
sys.exit(sys.version_info < (3, 10) or torch_version < (2, 4))
END
}
