"""Fails where a figure of the docs has no source, a link leads nowhere, or a page has grown too long.

    python benchmarks/check_figures.py        # exit status 1, and a line for each problem

The rule. In README.md, docs/performance.md, docs/layers.md, docs/support.md, docs/guides/*.md and docs/kernels/*.md a
*figure* is a speed-up ("3.7×", "2.2 times"), a time or a rate (ms, µs, seconds, TB/s, GB/s, TFLOP/s, GFLOP/s), a share
of time ("3 % slower"), a change ("0.28 → 0.24"), or a row of a table whose head names one of these. The paragraph, list
item or table it stands in has a *source*, or the paragraph that introduces this list or table has one, or the first
paragraph below the nearest heading. A source is one of

- a record that exists: `benchmarks/results/NAME.csv`;
- an experiment that exists: `benchmarks/experiments/NNN-slug`, with a script and a CSV in it;
- a heading of the frozen log: a link to `notebook.md#heading`.

Whatever of these is named has to exist, anywhere in these pages; so do steps of the notebook that are cited by number.
Blocks of code have no figures. Relative links and their anchors have to resolve in all pages, the notebook included.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

#: Pages whose figures need sources, and how many lines these pages may have.
CHECKED = (
    "README.md", "docs/performance.md", "docs/layers.md", "docs/support.md", "docs/guides/*.md", "docs/kernels/*.md",
)  # fmt: skip
LONGEST = {"README.md": 110, "docs/performance.md": 200, "docs/architecture.md": 150, "docs/kernels/*.md": 150}
LINKED = ("*.md", "docs/*.md", "docs/guides/*.md", "docs/kernels/*.md", "benchmarks/experiments/**/*.md")
NOTEBOOK = "docs/notebook.md"

_NUMBER = r"(?<![\w.])\d(?:[\d.,]*\d)?(?:e-?\d+)?"
FIGURE = re.compile(
    rf"{_NUMBER}\s?(?:ms|µs|us|s|TB/s|GB/s|TFLOP/s|GFLOP/s)\b"  # a time, a rate
    rf"|{_NUMBER}\s?×(?!\s?[\w(`])|{_NUMBER}\s?×\s(?:its|their|the|floor|PyTorch)"  # a speed-up; "16 × 8" is a shape
    rf"|{_NUMBER}\s(?:\w+\s)?times\b(?!\s+of\b)"  # "2.2 times slower", not "60 times of 18 layers"
    rf"|{_NUMBER}\s?%\s(?:slower|faster|longer|less|more|better|worse|of the time|busy)"
    r"|\d\.\d+\*{0,2}\s?→\s?\*{0,2}\d"  # a change; layers have whole numbers before their arrow
)
_FIGURE_HEAD = re.compile(r"\b(?:ms|milliseconds|µs|speed-up|measured)\b|× floor", re.IGNORECASE)
_NAMED = re.compile(r"benchmarks/results/([\w.-]+\.csv)|benchmarks/experiments/(\d{3}-[\w-]+)")
_IN_NOTEBOOK = re.compile(r"notebook\.md#([\w-]+)")
_STEPS = re.compile(r"\b[Ss]teps?\s(\d+[a-z]?(?:(?:,\s|,?\sand\s|\sto\s)\d+[a-z]?)*)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_ITEM = re.compile(r" *(?:[-*]|\d+\.) ")
_SCRIPTS = {".py", ".sh", ".cu"}


class Block(NamedTuple):
    """A heading, a paragraph, an item of a list, or a table."""

    kind: str
    line: int
    text: str


class Problem(NamedTuple):
    """What is wrong, and where."""

    page: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.what}"


def blocks(text: str) -> list[Block]:
    """The blocks of a page, those of code left out."""
    found: list[Block] = []
    kind, start, lines = "", 0, list[str]()
    fenced = False

    def end() -> None:
        nonlocal kind
        if kind not in ("", "code"):
            found.append(Block(kind, start, "\n".join(lines)))
        kind = ""
        lines.clear()

    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            end()
            fenced = not fenced
            continue
        if fenced or not line.strip():
            end()
            continue
        now = _kind(line, kind)
        if now != kind or now in ("heading", "item!"):
            end()
        if not kind:
            kind, start = now.rstrip("!"), number
        lines.append(line)
    end()
    return found


def _kind(line: str, before: str) -> str:
    """What a line begins or goes on with, after a line of ``before``; an item that begins has a mark."""
    if line.startswith("#"):
        return "heading"
    if line.lstrip().startswith("|"):
        return "table"
    if _ITEM.match(line):
        return "item!"
    if before in ("item", "paragraph"):
        return before
    return "code" if line.startswith("    ") else "paragraph"


def scoped(text: str) -> Iterator[tuple[Block, str]]:
    """The blocks of a page but its headings, each with what may hold its source.

    That is the block itself, what introduces it, and what its section begins with.
    """
    opening, introduction, after_heading = "", "", False
    for block in blocks(text):
        if block.kind == "heading":
            opening, introduction, after_heading = "", "", True
            continue
        if after_heading and block.kind == "paragraph":
            opening = block.text
        if block.kind == "paragraph":
            introduction = ""
        yield block, "\n".join((block.text, introduction, opening))
        after_heading = False
        if block.kind == "paragraph":
            introduction = block.text
        elif block.kind == "table":
            introduction = ""  # an introduction is of one table, or of one list


def has_figure(block: Block) -> bool:
    """Whether a paragraph, an item or a table states a figure."""
    text = re.sub(r"\]\([^)]*\)", "]", block.text)
    if block.kind != "table":
        return FIGURE.search(" ".join(text.split())) is not None
    head, *rows = text.splitlines()
    named = _FIGURE_HEAD.search(head) is not None
    return any(FIGURE.search(row) or (named and re.search(r"\d", row)) for row in rows[1:])


@cache
def anchors(page: Path) -> frozenset[str]:
    """What a page's headings are called in links, as GitHub makes it."""
    found: dict[str, int] = {}
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.kind == "heading":
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block.text.lstrip("#").strip()).lower()
            slug = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
            found[slug] = found.get(slug, -1) + 1
    return frozenset(name if not n else f"{name}-{n}" for name, most in found.items() for n in range(most + 1))


def steps_in(text: str) -> set[int]:
    """The numbers of all steps that a text names."""
    found = {int(number) for number in re.findall(r"^\| (\d+)[a-z]?\. ", text, re.MULTILINE)}
    for listed in _STEPS.findall(" ".join(text.split())):
        numbers = [int(number) for number in re.findall(r"\d+", listed)]
        found.update(range(numbers[0], numbers[-1] + 1) if " to " in listed else numbers)
    return found


def cited_steps(block: Block) -> set[int]:
    """Steps of the notebook that a block names, those in a column called "step" included."""
    found = steps_in(block.text)
    if block.kind == "table" and block.text.splitlines()[0].rstrip("| ").endswith("step"):
        for row in block.text.splitlines()[2:]:
            found.update(
                map(int, re.findall(r"\b\d+\b", re.sub(r"\]\([^)]*\)", "]", row.rstrip("| ").rsplit("|", 1)[1])))
            )
    return found


def sources(text: str, root: Path) -> tuple[list[str], list[str]]:
    """What a text names as sources: those that exist, and those that do not."""
    there, missing = list[str](), list[str]()
    for record, experiment in _NAMED.findall(text):
        if record:
            name, exists = record, (root / "benchmarks" / "results" / record).is_file()
        else:
            folder = root / "benchmarks" / "experiments" / experiment
            endings = {path.suffix for path in folder.glob("*")} if folder.is_dir() else set()
            name, exists = experiment, ".csv" in endings and bool(endings & _SCRIPTS)
        (there if exists else missing).append(name)
    notebook = root / NOTEBOOK
    for anchor in _IN_NOTEBOOK.findall(text):
        exists = notebook.is_file() and anchor in anchors(notebook)
        (there if exists else missing).append(f"notebook.md#{anchor}")
    return there, missing


def figures(root: Path) -> Iterator[Problem]:
    """Figures without a source, and sources that do not exist."""
    notebook = root / NOTEBOOK
    known = steps_in(notebook.read_text(encoding="utf-8")) if notebook.is_file() else set()
    for path in pages(root, CHECKED):
        page = path.relative_to(root).as_posix()
        for block, scope in scoped(path.read_text(encoding="utf-8")):
            there, _ = sources(scope, root)
            if has_figure(block) and not there:
                yield Problem(page, block.line, f"a figure without a source: {block.text.splitlines()[0][:80]}")
            for name in sources(block.text, root)[1]:
                yield Problem(page, block.line, f"there is no {name}, or it has no script and CSV")
            for step in sorted(cited_steps(block) - known):
                yield Problem(page, block.line, f"the notebook has no step {step}")


def links(root: Path) -> Iterator[Problem]:
    """Relative links that do not resolve."""
    for path in pages(root, LINKED):
        page = path.relative_to(root).as_posix()
        for block in blocks(path.read_text(encoding="utf-8")):
            for target in _LINK.findall(re.sub(r"`[^`]*`", "", block.text)):
                if re.match(r"[a-z]+:", target):
                    continue
                name, _, anchor = target.partition("#")
                other = (path.parent / name).resolve() if name else path
                if not other.exists():
                    yield Problem(page, block.line, f"a link to {target}, which does not exist")
                elif anchor and other.suffix == ".md" and anchor not in anchors(other):
                    yield Problem(page, block.line, f"a link to {target}, a heading that does not exist")


def lengths(root: Path) -> Iterator[Problem]:
    """Pages that are longer than they may be."""
    for pattern, most in LONGEST.items():
        for path in pages(root, (pattern,)):
            count = len(path.read_text(encoding="utf-8").splitlines())
            if count > most:
                yield Problem(path.relative_to(root).as_posix(), count, f"{count} lines, of at most {most}")


def pages(root: Path, patterns: tuple[str, ...]) -> list[Path]:
    """The files of some patterns."""
    return [path for pattern in patterns for path in sorted(root.glob(pattern))]


def problems(root: Path) -> list[Problem]:
    """All that is wrong."""
    return [*figures(root), *links(root), *lengths(root)]


def main() -> int:
    """Print what is wrong."""
    found = problems(Path(__file__).resolve().parent.parent)
    for problem in found:
        print(problem)
    print(f"{len(found)} problems" if found else "every figure has its source, every link its target")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
