"""What a result depends on beside the code: machine, driver and versions, for bug reports and for every row of a CSV.

Everything here works without a GPU, without a driver and without cuda-core: what is missing is said to be missing.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

MISSING = "not installed"


def version(distribution: str) -> str:
    """The installed version of a distribution, or ``not installed``."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return MISSING


@cache
def polyphase_version() -> str:
    """The version of this package."""
    import polyphase

    return polyphase.__version__


@cache
def commit() -> str:
    """The git commit this package runs from, with ``+`` for changes on top of it.

    What ``POLYPHASE_COMMIT`` says comes first, for those who copy a checkout's files to another machine; empty where
    neither tells.
    """
    if said := os.environ.get("POLYPHASE_COMMIT"):
        return said
    here = Path(__file__).parent
    # An installed copy may lie inside somebody else's checkout: ours is one that tracks this very file.
    if _output("git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name) == "":
        return ""
    changed = _output("git", "-C", str(here), "status", "--porcelain", "--untracked-files=no", ".")
    return _output("git", "-C", str(here), "rev-parse", "--short=10", "HEAD") + ("+" if changed else "")


@cache
def driver() -> str:
    """The version of NVIDIA's driver; empty where there is none."""
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0] if found else ""


def device_name(device_type: str) -> str:
    """The name of the current GPU, or of the processor."""
    if device_type == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return _processor()


def cudnn_version() -> str:
    """The version of cuDNN that PyTorch uses, as 9.19.0; empty where there is none."""
    import torch

    number = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if not number:
        return ""
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def nvrtc_version() -> str:
    """The version of NVIDIA's run-time compiler, or why it cannot be had and what to install."""
    from polyphase.jit.compiler import install_nvrtc

    try:
        from cuda.bindings import nvrtc

        error, major, minor = nvrtc.nvrtcVersion()
    except ImportError:
        return f"not available: cuda-bindings is not installed; {install_nvrtc()}"
    except Exception as failure:  # whatever the loader of the library raises: this is a report, it must not fail
        return f"not available: {first_line(failure)}; {install_nvrtc()}"
    return f"{major}.{minor}" if int(error) == 0 else f"not available: {error}"


def facts(device_type: str) -> dict[str, str]:
    """What every row of a CSV says of the machine and of the command that made it."""
    import torch

    return {
        "gpu": device_name(device_type),
        "driver": driver(),
        "torch": torch.__version__,
        "cudnn": cudnn_version(),
        "cuda": torch.version.cuda or "",
        "polyphase": polyphase_version(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "polyphase", *sys.argv[1:]]),
    }


def report() -> list[tuple[str, str]]:
    """What to put into a bug report, as pairs of name and value."""
    import torch

    rows = [
        ("polyphase", " ".join(filter(None, (polyphase_version(), commit())))),
        ("installed at", str(Path(__file__).parents[1])),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("platform", platform.platform()),
        ("processor", f"{_processor()}, {os.cpu_count()} cores"),
        ("PyTorch", torch.__version__),
        ("built for CUDA", torch.version.cuda or "no"),
        ("cuDNN", cudnn_version() or "none"),
        ("driver", driver() or "none"),
        ("cuda-core", version("cuda-core")),
        ("cuda-bindings", version("cuda-bindings")),
        ("NVRTC", nvrtc_version()),
    ]
    rows += [(f"GPU {index}", _gpu(index)) for index in range(torch.cuda.device_count())] or [("GPU", "none")]
    rows += [("kernel cache", cache_state())]
    rows += [(name, value) for name, value in sorted(os.environ.items()) if name.startswith("POLYPHASE_")]
    switches = ("NVIDIA_TF32_OVERRIDE", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING")
    rows += [(name, os.environ[name]) for name in switches if name in os.environ]
    return rows


def cache_state() -> str:
    """Where compiled kernels are kept, how many of what size, and whether more can be written."""
    try:
        from polyphase.jit.cache import KernelCache, cache_directory

        folder = cache_directory()
        if not folder.exists():
            parent = next(path for path in folder.parents if path.exists())
            state = "can be made" if os.access(parent, os.W_OK) else f"cannot be made: {parent} is not writable"
            return f"{folder} (does not exist yet; {state})"
        problem = KernelCache(folder).problem or ("" if os.access(folder, os.W_OK) else "NOT writable")
    except Exception as failure:  # a report must not fail
        return f"not available: {first_line(failure)}"
    sizes = []
    for path in folder.rglob("*"):
        try:
            sizes += [path.stat().st_size] if path.is_file() else []
        except OSError:  # another process has just removed it
            continue
    return f"{folder} ({len(sizes)} files, {sum(sizes) / 1e6:.1f} MB, {problem or 'writable'})"


def first_line(failure: BaseException) -> str:
    """The first line of an exception, with its type: what fits into a table."""
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0]}" if lines else type(failure).__name__


def _gpu(index: int) -> str:
    import torch

    try:
        found = torch.cuda.get_device_properties(index)
    except Exception as failure:  # a driver too old, a GPU that is lost: this is what the report is for
        return f"not usable: {first_line(failure)}"
    memory = found.total_memory / 2**30
    return f"{found.name}, sm_{found.major}{found.minor}, {found.multi_processor_count} SMs, {memory:.0f} GiB"


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
