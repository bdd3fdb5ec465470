"""Files of the docs that a script makes of something else, written again or compared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(what: str, texts: Mapping[Path, str]) -> int:
    """Writes the files; with ``--check`` on the command line, says which differ, and returns 1 if one does."""
    parser = argparse.ArgumentParser(description=f"Make {what}.")
    parser.add_argument("--check", action="store_true", help="write nothing; say what is out of date")
    check = parser.parse_args().check
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            print(f"{path} is out of date: python {sys.argv[0]}", file=sys.stderr)
        else:
            path.write_text(texts[path], encoding="utf-8")
    return int(check and bool(stale))
