"""Python in processes of their own, with kernel caches of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent


def environment(cache: Path | None = None) -> dict[str, str]:
    """What a child needs to import polyphase and the tests' helpers; ``cache`` is its kernel cache."""
    chosen = {} if cache is None else {"POLYPHASE_CACHE_DIR": str(cache)}
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, **chosen}


def run_python(script: str, cache: Path | None = None, timeout: float = 200) -> str:
    """What the script prints; raises AssertionError with its errors where it fails."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=environment(cache), capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout
