"""Chromium without a window, driven by Playwright, and everything that a page did and should not."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Chromium asks its maker for many things by itself; none of that is the page's doing, and none of it is let out.
# No name but this machine's own is ever resolved, so that a page that does ask somebody is seen but not answered.
OPTIONS = (
    "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-quic", "--disable-dev-shm-usage", "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)  # fmt: skip
WINDOW = (1200, 900)
# Nothing in a page may set this on its window: names that would like to run do.
SENTINEL = "__hacked"
PATIENCE_MS = 120_000  # of a busy machine; nothing is tested on time
SLOW_START = re.compile(r"took [\d.]+ms to activate|taking too long to activate")


class Watched:
    """A page and its faults from its first moment on.

    Attributes:
        page: Playwright's page.
        home: The beginning of the addresses that it may ask for; files, data and blobs are on this machine anyway.
        faults: Errors and warnings in its console, uncaught exceptions, other addresses, opened dialogs.
    """

    def __init__(self, page: Any, home: str = "file:") -> None:
        self.page, self.home = page, home
        self.faults: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        page.on("request", lambda request: self._on_address(request.url))
        page.on("websocket", lambda socket: self._on_address(socket.url.replace("ws:", "http:", 1)))
        page.on("dialog", self._on_dialog)

    def trouble(self) -> list[str]:
        """Return all faults, one line each, with the scripts of names that ran."""
        ran = [frame.url for frame in self.page.frames if frame.evaluate(f"window.{SENTINEL} !== undefined")]
        return [*self.faults, *(f"ran the script of a name in {address}" for address in ran)]

    def _on_console(self, message: Any) -> None:
        # JupyterLab warns of plug-ins that take over five seconds to start: that is the machine's load, not a fault.
        if message.type in {"error", "warning"} and not SLOW_START.search(message.text):
            self.faults.append(f"console {message.type}: {message.text}")

    def _on_address(self, address: str) -> None:
        if not address.startswith((self.home, "file:", "data:", "blob:", "about:")):
            self.faults.append(f"asked for {address}")

    def _on_dialog(self, dialog: Any) -> None:
        self.faults.append(f"opened a dialog: {dialog.message}")
        dialog.dismiss()


@contextmanager
def open_chromium() -> Iterator[Any]:
    """Start this machine's own Chromium; nothing is downloaded."""
    from playwright.sync_api import sync_playwright  # only in the development lock; tests/browser skips without it

    options = [*OPTIONS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]  # root's Chromium has no sandbox
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=options)
        try:
            yield browser
        finally:
            browser.close()
