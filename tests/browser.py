"""A headless Chromium, driven by the WebDriver protocol: what pages look like, and what they do, in a real browser."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DRIVER = shutil.which("chromedriver")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "needs Chromium and its driver: apt-get install chromium chromium-driver"
#: Width and height in CSS pixels.
DESKTOP, PHONE = (1280, 900), (390, 844)


def available() -> bool:
    return DRIVER is not None and CHROMIUM is not None


class Browser:
    """One window."""

    def __init__(self, address: str, size: tuple[int, int]) -> None:
        self._address = address
        options: dict[str, Any] = {
            "binary": CHROMIUM,
            "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
            "mobileEmulation": {"deviceMetrics": {"width": size[0], "height": size[1], "pixelRatio": 1}},
        }
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as failure:
            raise RuntimeError(failure.read().decode()) from None

    def open(self, address: str) -> None:
        """Load a page, and forget what was logged before."""
        self._ask("POST", f"/session/{self._session}/url", {"url": address})

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self._ask("POST", f"/session/{self._session}/execute/sync", {"script": script, "args": []})

    def complaints(self) -> list[str]:
        """Warnings and errors in the console since it was last asked."""
        entries = self._ask("POST", f"/session/{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def overflow(self) -> list[str]:
        """Elements that make the page wider than its window."""
        return self.run(  # type: ignore[no-any-return]
            "const width = document.documentElement.clientWidth;"
            "if (document.documentElement.scrollWidth <= width) return [];"
            "return [...document.querySelectorAll('body *')].filter((each) =>"
            " each.getBoundingClientRect().right > width + 1).map((each) => each.outerHTML.slice(0, 120));"
        )

    def close(self) -> None:
        """End it."""
        self._ask("DELETE", f"/session/{self._session}")


@contextmanager
def driver() -> Iterator[str]:
    """The address of a driver that runs as long as the context."""
    assert DRIVER is not None
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            started, line = time.monotonic(), ""
            while "on port " not in line or "success" not in line:
                assert time.monotonic() - started < 60, "the driver does not start"
                line = process.stdout.readline()
            yield f"http://127.0.0.1:{line.split('on port ')[1].strip(' .' + chr(10))}"
        finally:
            process.terminate()


@contextmanager
def window(address: str, size: tuple[int, int]) -> Iterator[Browser]:
    """A window of a driver's."""
    browser = Browser(address, size)
    try:
        yield browser
    finally:
        browser.close()
