# Sourced by the other scripts. `prepare EXTRA MODULE...` leaves in $python an interpreter that runs polyphase from this
# checkout, with its tools on the PATH.
#
# Where python3 (or $PYTHON) can import the modules already, it is taken as it is and nothing is installed: an
# environment that is active, or a GPU machine with a PyTorch of its own and no network. Else .venv is made and filled
# with the package and its EXTRA, and taken from then on where $PYTHON is not set.

# The PyTorch of machines that have neither one nor an NVIDIA GPU: its build for the CPU, which is found where pip is told
# of it, by its settings (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) or by $TORCH_INDEX, the address of PyTorch's index of CPU
# wheels. What PyPI itself has under this number is for CUDA on Linux, gigabytes of it.
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
      say "What .venv lacks of polyphase's dependencies [$extra] will be downloaded: about 250 MB, 650 MB on disk"
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
  if can_import "$python" torch; then return; fi
  if nvidia-smi > /dev/null 2>&1; then
    say "PyTorch will be downloaded, for CUDA: about 3 GB, 5 GB on disk"
  else
    install_cpu_torch
  fi
}

install_cpu_torch() {
  local answer index=()
  if [[ -n ${TORCH_INDEX:-} ]]; then index=(--extra-index-url "$TORCH_INDEX"); fi
  if [[ $(uname -s) == Linux ]]; then # other systems' builds are for the CPU, and have no such name
    say "PyTorch's build for the CPU will be downloaded, torch $CPU_TORCH+cpu: about 200 MB, 800 MB on disk"
    if answer=$("$python" -m pip install --quiet ${index[@]+"${index[@]}"} "torch==$CPU_TORCH+cpu" 2>&1); then return; fi
    # The second is what pip says of it where a file of constraints names torch.
    if [[ $answer != *"No matching distribution found for torch=="* && $answer != *ResolutionImpossible* ]]; then
      say "$answer"
      exit 1
    fi
    say "pip finds no such build. Instead PyPI's torch $CPU_TORCH will be downloaded, which where it is for CUDA is about" \
      "3 GB, 5 GB on disk. To have the small one, stop this, and name PyTorch's index of CPU wheels (pytorch.org says" \
      "where it is) in \$TORCH_INDEX"
  fi
  "$python" -m pip install ${index[@]+"${index[@]}"} "torch==$CPU_TORCH"
}

# A new virtual environment in the folder $1 that also finds what $python finds. It has no pip, nor the setuptools that
# come with pip: PyTorch asks for newer ones.
venv_beside() {
  "$python" -m venv --without-pip "$1"
  "$python" -c 'import sys, sysconfig; print("\n".join(path for path in sys.path if "site-packages" in path
    or path == sysconfig.get_path("purelib")))' > "$("$1/bin/python" -c \
    'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
}

say() { printf '%s\n' "$*" >&2; }

# Whether an interpreter is new enough, and can import these modules, a PyTorch that is new enough among them.
can_import() {
  "$1" - "${@:2}" > /dev/null 2>&1 << 'END'
import importlib, sys

modules = {name: importlib.import_module(name) for name in sys.argv[1:]}
torch_version = tuple(map(int, modules["torch"].__version__.split(".")[:2]))
sys.exit(sys.version_info < (3, 10) or torch_version < (2, 4))
END
}
