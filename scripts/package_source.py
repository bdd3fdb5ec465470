"""Copies what a distribution is built from, with links that also lead somewhere on a package index.

    python scripts/package_source.py FOLDER [HOME]

HOME is the address of the repository on the web, which the repository itself does not know: with it, relative links of
README.md become links to HOME, and the metadata name it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
_RELATIVE = re.compile(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?![a-z]+:|#)([^)\s]+)\)")

URLS = """
[project.urls]
Homepage = "{home}"
Documentation = "{home}/tree/main/docs"
Changelog = "{home}/blob/main/CHANGELOG.md"
Issues = "{home}/issues"
"""


def with_home(text: str, home: str) -> str:
    """A page whose relative links lead to the repository at ``home``; pictures are named as files, pages as pages."""

    def absolute(found: re.Match[str]) -> str:
        kind = "raw" if found[1] else "blob"
        return f"{found[1]}[{with_home(found[2], home)}]({home}/{kind}/main/{found[3]})"

    return _RELATIVE.sub(absolute, text)


def copy(folder: Path, home: str | None) -> None:
    """Copies the package, README.md, LICENSE and pyproject.toml."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "src", "README.md", "LICENSE",
         "CHANGELOG.md", "pyproject.toml"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, tracked):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    if home:
        readme, project = folder / "README.md", folder / "pyproject.toml"
        readme.write_text(with_home(readme.read_text(encoding="utf-8"), home.rstrip("/")), encoding="utf-8")
        with project.open("a", encoding="utf-8") as file:
            file.write(URLS.format(home=home.rstrip("/")))


if __name__ == "__main__":
    copy(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
