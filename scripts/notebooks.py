"""Makes a notebook of each tutorial: text becomes Markdown cells, code becomes code cells.

    python scripts/notebooks.py            # docs/tutorials/*.md to *.ipynb
    python scripts/notebooks.py --check    # exit status 1 where a notebook is not what its page says

Pages are the source, and `scripts/snippets.py` runs them; notebooks are for those who would rather click than paste.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from generated import write_or_check

ROOT = Path(__file__).parent.parent
_FENCE = re.compile(r"^```(?P<info>\w+[^\n`]*)\n(?P<code>.*?)^```\n", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_REMARK = re.compile(r"<!-- ([^\n]*) -->\n?")


def cells(text: str) -> Iterator[tuple[str, str]]:
    """The cells of a page: ``markdown`` or ``code``, and what stands in it."""
    yield "code", "%pip install torch-polyphase"
    end = 0
    for fence in _FENCE.finditer(text):
        yield "markdown", _prose(text[end : fence.start()])
        title = _TITLE.search(fence["info"])
        code = fence["code"].rstrip("\n")
        if title:
            code = f"%%writefile {title[1]}\n{code}"
        elif fence["info"].startswith("sh"):
            code = "\n".join(f"!{line}" for line in code.splitlines())
        yield "code", code
        end = fence.end()
    yield "markdown", _prose(text[end:])


def _prose(text: str) -> str:
    """Markdown without remarks for scripts and without links to pages that a notebook does not have beside it."""
    text = _REMARK.sub(lambda found: f"This cell {found[1]}.\n" if found[1].startswith("needs") else "", text)
    text = re.sub(r"[^.\n]*\n?\[notebook\]\([^)]*\)\.", "", text)
    return re.sub(r"\[([^]]*)\]\(\.\.[^)]*\)", r"\1", text).strip()


def notebook(text: str) -> str:
    """The notebook of a page, as JSON."""
    made: list[dict[str, object]] = []
    for kind, source in cells(text):
        if not source:
            continue
        cell: dict[str, object] = {"cell_type": kind, "id": f"cell-{len(made)}", "metadata": {}}
        cell["source"] = source.splitlines(keepends=True)
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        made.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    pages = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
    made = {page.with_suffix(".ipynb"): notebook(page.read_text(encoding="utf-8")) for page in pages}
    sys.exit(write_or_check("a notebook of each tutorial", made))
