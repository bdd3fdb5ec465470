"""The command line: ``polyphase report | check | bench | explain | plans | tune | emit | env | compile | diff``."""

from __future__ import annotations

import sys
from pathlib import PurePath

try:
    import rich  # noqa: F401

    from polyphase.commands.app import app
except ModuleNotFoundError as missing:
    if missing.name not in ("typer", "rich"):
        raise
    raise SystemExit(
        f'polyphase\'s command line needs {missing.name}, which is not installed: pip install "torch-polyphase[cli]"'
    ) from None


def main() -> None:
    """Run the command line, under the name that it was called by."""
    called = PurePath(sys.argv[0]).stem
    app(prog_name="python -m polyphase" if called == "__main__" else called)


if __name__ == "__main__":
    main()
