"""compute-sanitizer over a sample of layers (``sanitizer_sample.py``), in all passes and memory formats."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from polyphase.jit.ahead import compile_ahead
from polyphase.problem.device import DeviceInfo
from processes import environment
from sanitizer_sample import runs

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def sanitizer() -> str | None:
    """The program, on the PATH or where toolkits put it."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [Path(home) / part for home in homes if home for part in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(map(str, folders))
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the sample's kernels: the compiler is slow under the sanitizer."""
    folder = tmp_path_factory.mktemp("sanitizer") / "kernels"
    device = DeviceInfo.of(torch.device("cuda", 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYPHASE_CACHE_DIR", str(folder))
        compile_ahead((source for _, _, _, program, _ in runs(device) for source in program.sources), device.arch)
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_sanitizer(tool: str, cache: Path) -> None:
    program = sanitizer()
    if program is None:
        pytest.skip(
            "compute-sanitizer is not on the PATH, nor in CUDA_HOME or /usr/local/cuda; the CUDA toolkit has it"
        )
    done = subprocess.run(
        [
            program,
            "--tool",
            tool,
            "--error-exitcode",
            "99",
            "--report-api-errors",  # cuda-bindings asks the driver for functions that it may not have
            "no",
            sys.executable,
            Path(__file__).parent / "sanitizer_sample.py",
        ],
        env={**environment(cache), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    told = f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    assert done.returncode == 0, told
    assert re.search(r"\d+ launches are exact", done.stdout), told
    assert re.search(r"SUMMARY: 0 (errors|hazards)", done.stdout + done.stderr), told
