"""Runs the code of Markdown pages as a reader would, with the polyphase that is installed.

    python scripts/snippets.py README.md docs/guides/*.md        # exit status 1 and the block where one fails

Each page runs in an empty folder. Its ``python`` blocks are one program; a block with a title,
```` ```python title="my_model.py" ````, is a file that it is written to. In ``sh`` blocks every line is a command:
``polyphase ...`` and ``python ...`` run, and of ``pip install`` lines the name is checked. Without a GPU ``.cuda()`` is
left out, ``"cuda"`` is ``"cpu"``, and blocks below ``<!-- needs a GPU -->`` are not run, nor are those
below ``<!-- needs the package NAME -->`` without it; blocks below ``<!-- not run: REASON -->`` never are.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import runpy
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # what is computed is small, and other processes may be at work

import torch

import polyphase  # noqa: F401  # with PyTorch, before processes fork

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_REMARK = re.compile(r"<!-- (needs a GPU|needs the package \w+|not run: [^\n]*) -->\s*\Z")
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
    programs: list[tuple[str, str]] = []  # where a block begins, and its code
    commands: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="snippets-") as name:
        folder, files = Path(name), 0
        for snippet in snippets(path.read_text(encoding="utf-8")):
            where = f"{path}:{snippet.line}"
            if snippet.remark.startswith("not run") or snippet.language in ("text", "toml", "yaml", "cuda", "cpp"):
                continue
            if snippet.language not in ("python", "sh"):
                raise BrokenSnippetError(f"{where}: nothing runs a block of {snippet.language or 'no language'}")
            package = snippet.remark.removeprefix("needs the package ")
            missing = not gpu if snippet.remark == "needs a GPU" else package and find_spec(package) is None
            if missing:
                continue
            code = snippet.code if gpu else snippet.code.replace(".cuda()", "").replace('"cuda"', '"cpu"')
            if snippet.title:
                (folder / snippet.title).write_text(code, encoding="utf-8")
                files += 1
            else:
                (programs if snippet.language == "python" else commands).append((where, code))
        if programs:
            _run(lambda: _program(programs), folder, programs[0][0])
        for where, code in commands:
            for line in code.splitlines():
                _command(line, folder, where)
    return len(programs) + len(commands) + files


def _program(blocks: list[tuple[str, str]]) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    for where, code in blocks:
        exec(compile(code, where, "exec"), names)


def _command(line: str, folder: Path, where: str) -> None:
    words = shlex.split(line, comments=True)
    if words[:2] == ["pip", "install"] or words[:4] == ["python", "-m", "pip", "install"]:
        names = [word for word in words if "polyphase" in word]
        if any(not re.fullmatch(rf"{DISTRIBUTION}(\[[\w,]+\])?", name) for name in names):
            raise BrokenSnippetError(f"{where}: {line}: the distribution is {DISTRIBUTION}")
    elif words[:1] == ["polyphase"]:
        _run(lambda: _polyphase(words), folder, where)
    elif words[:1] == ["python"]:
        _run(lambda: _script(words[1:]), folder, where)
    elif words:
        raise BrokenSnippetError(f"{where}: nothing runs {line!r}")


def _polyphase(words: list[str]) -> None:
    from polyphase.__main__ import main as program

    sys.argv = words
    program()


def _script(words: list[str]) -> None:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def _run(work: Callable[[], None], folder: Path, where: str) -> None:
    """Runs what a reader would start Python for, in a fork of this process, which has imported PyTorch already."""
    log = folder / ".log"
    process = multiprocessing.get_context("fork").Process(target=_child, args=(work, folder, log))
    process.start()
    process.join(MOST_SECONDS)
    if process.is_alive():
        process.kill()
        raise BrokenSnippetError(f"{where}: not done after {MOST_SECONDS} s")
    if process.exitcode:
        raise BrokenSnippetError(f"{where}: exit status {process.exitcode}\n{log.read_text(errors='replace')}")


def _child(work: Callable[[], None], folder: Path, log: Path) -> None:
    sys.stdout = sys.stderr = log.open("w", encoding="utf-8", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    work()


def has_gpu() -> bool:
    """Whether blocks run on a GPU. Asked of the driver, as a process that has started CUDA must not fork."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
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
