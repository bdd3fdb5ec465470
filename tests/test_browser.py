"""The report's page and the docs' site in a headless browser: they fit desktop and phone, and their tables sort."""

from __future__ import annotations

import http.server
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

import browser
from browser import DESKTOP, PHONE, Browser
from polyphase.__main__ import app
from test_report import MODEL

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not browser.available(), reason=browser.MISSING)


@pytest.fixture(scope="module")
def driver() -> Iterator[str]:
    with browser.driver() as address:
        yield address


@pytest.fixture(params=[DESKTOP, PHONE], ids=["desktop", "phone"])
def window(request: pytest.FixtureRequest, driver: str) -> Iterator[Browser]:
    with browser.window(driver, request.param) as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a model of several layers."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    done = CliRunner().invoke(
        app, ["report", str(folder / "model.py"), "--device", "cpu", "-o", str(folder / "page.html")]
    )
    assert done.exit_code == 0, done.output
    return folder / "page.html"


def column(window: Browser, table: str, head: str) -> list[str]:
    """The cells of a table's column, top down; where it has several bodies, the first of each."""
    found: list[str] = window.run(
        f"const table = {table}; const at = [...table.tHead.rows[0].cells].findIndex("
        f"(each) => each.textContent.trim() == {head!r});"
        "const rows = table.tBodies.length > 1 ? [...table.tBodies].map((each) => each.rows[0])"
        " : [...table.tBodies[0].rows]; return rows.map((row) => (row.cells[at] || row.cells[0]).textContent.trim());"
    )
    return found


def click(window: Browser, table: str, head: str) -> None:
    window.run(f"[...{table}.tHead.rows[0].cells].find((each) => each.textContent.trim() == {head!r}).click()")


def test_the_report_fits_and_sorts(window: Browser, report: Path) -> None:
    window.open(report.as_uri())
    assert window.overflow() == []
    table = "document.querySelector('table')"
    sums = (
        f"return [...{table}.tBodies].map((each) => [...each.rows].slice(1)"
        ".reduce((sum, row) => sum + Number(row.cells[2].textContent), 0));"
    )
    times = window.run(sums)
    assert len(times) == 3
    click(window, table, "polyphase, ms")
    assert window.run(sums) == pytest.approx(sorted(times, reverse=True))
    click(window, table, "polyphase, ms")
    assert window.run(sums) == pytest.approx(sorted(times))
    click(window, table, "pass")
    names = column(window, table, "pass")
    assert names == sorted(names)
    assert window.overflow() == []
    assert window.complaints() == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the docs' site."""
    if any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip("needs MkDocs: pip install 'torch-polyphase[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Tell nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
def test_every_page_of_the_site_fits(window: Browser, site: str) -> None:
    """And loads nothing from elsewhere, and complains of nothing."""
    pages = [path.relative_to(ROOT / "docs").with_suffix("") for path in sorted((ROOT / "docs").glob("**/*.md"))]
    for page in pages:
        address = f"{site}/{'' if page.name == 'index' else f'{page.as_posix()}/'}"
        window.open(address)
        assert window.run("return document.querySelectorAll('article h1').length") >= 1, address
        assert window.overflow() == [], address
        assert window.complaints() == [], address
        loaded = window.run("return performance.getEntriesByType('resource').map((each) => each.name)")
        assert [each for each in loaded if not each.startswith((site, "data:"))] == [], address


@pytest.mark.slow
def test_tables_of_the_site_sort(window: Browser, site: str) -> None:
    window.open(f"{site}/performance/")
    sortable = window.run("return [...document.querySelectorAll('th')].filter((each) => each.tabIndex == 0).length")
    assert sortable > 10
    table = "[...document.querySelectorAll('table')].find((each) => each.querySelector('th').tabIndex == 0)"
    heads = window.run(f"return [...{table}.tHead.rows[0].cells].map((each) => each.textContent.trim())")
    before = column(window, table, heads[0])
    click(window, table, heads[0])
    after = column(window, table, heads[0])
    assert sorted(before) == sorted(after)
    assert window.run(f"return {table}.tHead.rows[0].cells[0].getAttribute('aria-sort')") in ("ascending", "descending")
    click(window, table, heads[1])
    assert sorted(column(window, table, heads[0])) == sorted(before)
    assert window.complaints() == []
