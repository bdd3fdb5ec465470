"""The docs: their code runs, every public name is documented, and every page is in the site."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from polyphase import api
from polyphase.commands.app import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CODE = [ROOT / "README.md", DOCS / "index.md", DOCS / "reference.md", *sorted(DOCS.glob("guides/*.md"))]
CODE += sorted(DOCS.glob("tutorials/*.md"))


@pytest.mark.slow
def test_all_code_of_readme_and_guides_runs() -> None:
    """In one process that imports PyTorch once. On a machine without a GPU on the CPU."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "snippets.py", *CODE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ran = [int(count) for count in re.findall(r": (\d+) blocks run", done.stdout)]
    assert len(ran) == len(CODE)
    assert sum(ran) >= 25


def test_figures_are_those_that_the_script_draws() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "figures.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_notebooks_are_those_of_the_tutorials() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "notebooks.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for path in DOCS.glob("tutorials/*.ipynb"):
        code = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
        assert len(code) >= 6
        for cell in code:
            text = "".join(cell["source"])
            if not text.startswith(("%", "!")):
                compile(text, str(path), "exec")


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 110
    assert len(text.split()) <= 700


def test_every_public_name_is_in_the_reference() -> None:
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: polyphase\.(\w+)$", text, re.MULTILINE)) == sorted(api.__all__)
    for name in api.__all__:
        assert getattr(api, name).__doc__, name


def test_every_page_is_in_the_navigation() -> None:
    named = set(
        re.findall(r"^ +- [^:\n]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    )
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.glob("**/*.md")}
    assert named == pages | {"contributing.md", "changelog.md"}


def test_readme_s_picture_is_that_of_the_record() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "picture.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_messages_of_errors_are_in_the_guide() -> None:
    """By words between the values of each message of the package's errors."""
    guide = " ".join((DOCS / "guides" / "troubleshooting.md").read_text(encoding="utf-8").split())
    raised = re.compile(r"raise (?:UnsupportedError|CompilationError|PolyphaseError|RuntimeError)\(\s*f?\"([^\"]+)\"")
    files = [ROOT / "src" / "polyphase" / name for name in ("torch_op/validate.py", "torch_op/operators.py")]
    files += [ROOT / "src" / "polyphase" / name for name in ("versions.py", "between.py", "pending.py")]
    files += sorted((ROOT / "src" / "polyphase" / "jit").glob("*.py"))
    found = [message for path in files for message in raised.findall(path.read_text(encoding="utf-8"))]
    assert len(found) >= 15
    for message in found:
        parts = [part.strip(" ,:;(") for part in re.split(r"\{[^}]*\}", message)]
        words = [" ".join(part.split()[:4]).rstrip(",;:") for part in parts if len(part.split()) >= 3]
        assert any(each in guide for each in words), f"{message!r}: {words!r}"


_LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")


def headings(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    for title in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {slug if number == 0 else f"{slug}-{number}" for slug, count in found.items() for number in range(count + 1)}


def test_links_lead_somewhere() -> None:
    """Those within the repository, to files and to headings; no page of the site is asked."""
    pages = [*ROOT.glob("*.md"), *DOCS.glob("**/*.md"), *(ROOT / "benchmarks").glob("**/*.md")]
    wrong = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for target, anchor in _LINK.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
            if re.match(r"[a-z]+:", target):
                continue
            path = (page.parent / target) if target else page
            there = path.exists()
            if there and anchor and path.suffix == ".md":
                there = anchor in headings(path.read_text(encoding="utf-8"))
            wrong += [] if there else [f"{page.relative_to(ROOT)}: {target}#{anchor}"]
    assert wrong == []


def test_hints_name_what_exists() -> None:
    """In messages and pages: the distribution that pip installs, commands, and names of the package."""
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("guides/*.md"), *DOCS.glob("tutorials/*.md")]
    for path in [*(ROOT / "src").glob("**/*.py"), *pages]:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"pip install (?:-\S+ )*\"?([\w.-]+)", text):
            assert name in ("torch-polyphase", "torch", "cuda-core", "onnx", "."), f"{path}: {name}"
        for name in re.findall(r"(?<![`\w])(?:`|python -m )polyphase (?!import|but|does|can|has)([a-z]+)\b", text):
            assert name in commands, f"{path}: {name}"
        for name in re.findall(r"(?<![.\w])polyphase\.(\w+)\(", text):
            assert name in api.__all__, f"{path}: {name}"
