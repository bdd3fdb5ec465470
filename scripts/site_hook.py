"""A hook of MkDocs: what lies outside docs/ is part of the site too, so that every link of these pages leads somewhere.

CONTRIBUTING.md and CHANGELOG.md become pages. Other files that a page links to (records, pictures, scripts, pages of
experiments) are copied into ``files/``; a link to a folder leads to its README.md.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SCRIPTS = {"src/polyphase/bench/sort.js": "assets/sort.js"}
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]*)(#[^)\s]*)?(\))")


def page_text(name: str) -> str:
    """A page of the repository's root, with links as from docs/."""
    text = (ROOT / name).read_text(encoding="utf-8")

    def from_docs(link: re.Match[str]) -> str:
        target = link[2]
        if not target or re.match(r"[a-z]+:", target):
            return link[0]
        return f"{link[1]}{posixpath.relpath(target, 'docs')}{link[3] or ''}{link[4]}"

    return _LINK.sub(from_docs, text)


def outside(source: str, target: str) -> Path | None:
    """The file outside docs/ that a link of the page ``source`` (as from docs/) leads to."""
    if not target or re.match(r"[a-z]+:", target):
        return None
    path = (DOCS / posixpath.dirname(source) / target).resolve()
    if not path.is_relative_to(ROOT) or path.is_relative_to(DOCS):
        return None
    return path / "README.md" if path.is_dir() else path


def place(path: Path) -> str:
    """Where a file from outside docs/ lies in the site's sources."""
    name = path.relative_to(ROOT).as_posix()
    return PAGES.get(name, f"files/{name}{'.txt' if path.suffix in ('.md', '.py', '.sh', '.cu', '.c') else ''}")


def linked(pages: Iterable[tuple[str, str]]) -> set[Path]:
    """The files outside docs/ that pages link to."""
    found = (outside(name, link[2]) for name, text in pages for link in _LINK.finditer(text))
    return {path for path in found if path is not None and path.is_file()}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages, scripts and files from outside docs/."""
    for name, script in SCRIPTS.items():
        files.append(File.generated(config, script, content=(ROOT / name).read_text(encoding="utf-8")))
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=page_text(name)))
    pages = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    for path in sorted(linked(pages)):
        if place(path) not in PAGES.values():
            files.append(File.generated(config, place(path), content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Leads links to what lies outside docs/ to where it lies in the site."""
    source = page.file.src_uri

    def lead(link: re.Match[str]) -> str:
        path = outside(source, link[2])
        if path is None:
            return link[0]
        target = posixpath.relpath(place(path), posixpath.dirname(source) or ".")
        return f"{link[1]}{target}{link[3] or ''}{link[4]}"

    return _LINK.sub(lead, markdown)
