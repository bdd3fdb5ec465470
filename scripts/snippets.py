"""Runs the code of Markdown pages as a reader would, with the polyphase that is installed.

    python scripts/snippets.py README.md docs/guides/*.md        # exit status 1 and the block where one fails

Each page runs in an empty folder. Its ``python`` blocks are one program; a block with a title,
```` ```python title="my_model.py" ````, is a file that it is written to. In ``sh`` blocks every line is a command:
``polyphase ...`` and ``python ...`` run, and of ``pip install`` lines the name is checked. Without a GPU ``.cuda()`` is
left out, ``"cuda"`` is ``"cpu"``, and blocks below ``<!-- needs a GPU -->`` are not run; blocks below
``<!-- not run: REASON -->`` never are.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_REMARK = re.compile(r"<!-- (needs a GPU|not run: [^\n]*) -->\s*\Z")
DISTRIBUTION = "torch-polyphase"
MOST_SECONDS = 240


class Snippet(NamedTuple):
    """A block of code: where it begins, its language, the file that it is, and why it is not run."""

    line: int
    language: str
    title: str
    code: str
    remark: str


class BrokenSnippetError(Exception):
    """A block that does not run, or that nothing would run."""


def snippets(text: str) -> Iterator[Snippet]:
    """The blocks of code of a page."""
    for found in _FENCE.finditer(text):
        indent = len(found["indent"])
        code = "".join(line[indent:] if line.strip() else line for line in found["code"].splitlines(keepends=True))
        language, _, attributes = found["info"].strip().partition(" ")
        title = _TITLE.search(attributes)
        remark = _REMARK.search(text, 0, found.start())
        yield Snippet(
            text.count("\n", 0, found.start()) + 1,
            language,
            title[1] if title else "",
            code,
            remark[1] if remark else "",
        )


def run_page(path: Path, gpu: bool) -> int:
    """Runs a page; returns how many blocks it ran. Raises `BrokenSnippetError`."""
    count, program = 0, ""
    with tempfile.TemporaryDirectory(prefix="snippets-") as name:
        folder = Path(name)
        for snippet in snippets(path.read_text(encoding="utf-8")):
            where = f"{path}:{snippet.line}"
            if snippet.remark.startswith("not run") or snippet.language in ("text", "toml", "yaml", "cuda", "cpp"):
                continue
            if snippet.language not in ("python", "sh"):
                raise BrokenSnippetError(f"{where}: nothing runs a block of {snippet.language or 'no language'}")
            if snippet.remark and not gpu:
                continue
            code = snippet.code if gpu else snippet.code.replace(".cuda()", "").replace('"cuda"', '"cpu"')
            if snippet.title:
                (folder / snippet.title).write_text(code, encoding="utf-8")
            elif snippet.language == "python":  # with the blocks before it, from whose names it starts
                program += f"\n{code}"
                _run([sys.executable, "-c", program], folder, where)
            else:
                for line in code.splitlines():
                    _command(line, folder, where)
            count += 1
    return count


def _command(line: str, folder: Path, where: str) -> None:
    words = shlex.split(line, comments=True)
    if words[:2] == ["pip", "install"] or words[:4] == ["python", "-m", "pip", "install"]:
        names = [word for word in words if "polyphase" in word]
        if any(not re.fullmatch(rf"{DISTRIBUTION}(\[[\w,]+\])?", name) for name in names):
            raise BrokenSnippetError(f"{where}: {line}: the distribution is {DISTRIBUTION}")
    elif words[:1] == ["polyphase"]:
        _run([sys.executable, "-m", *words], folder, where)
    elif words[:1] == ["python"]:
        _run([sys.executable, *words[1:]], folder, where)
    elif words:
        raise BrokenSnippetError(f"{where}: nothing runs {line!r}")


def _run(command: list[str], folder: Path, where: str) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=MOST_SECONDS, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise BrokenSnippetError(f"{where}: not done after {MOST_SECONDS} s") from None
    if done.returncode:
        raise BrokenSnippetError(f"{where}: exit status {done.returncode}\n{done.stdout}{done.stderr}")


def has_gpu() -> bool:
    """Whether blocks run on a GPU."""
    import torch

    return torch.cuda.is_available()


def main() -> int:
    """Runs the pages that are named."""
    parser = argparse.ArgumentParser(description="Run the code of Markdown pages.")
    parser.add_argument("pages", nargs="+", type=Path)
    gpu, failed = has_gpu(), 0
    for page in parser.parse_args().pages:
        try:
            print(f"{page}: {run_page(page, gpu)} blocks run")
        except BrokenSnippetError as failure:
            print(failure, file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
