"""Chromium without a window, driven by Playwright, and all that a page did which a test has to answer for."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, Request

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Chromium asks its maker for many things by itself; none of that is the page's doing, and none of it is let out.
# No name but this machine's own is ever resolved, so that a page that does ask somebody is seen but not answered.
OPTIONS = (
    "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-quic", "--disable-dev-shm-usage", "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)  # fmt: skip
WINDOW = (1200, 900)
# What nothing in a page may do: names that would like to run set this on its window.
SENTINEL = "__hacked"
PATIENCE_MS = 120_000  # of a busy machine; nothing is tested on time
SLOW_START = re.compile(r"took [\d.]+ms to activate|taking too long to activate")


@dataclass
class Watched:
    """A page, and what it did from its first moment on.

    Attributes:
        page: Playwright's.
        home: what the addresses that it may ask for begin with; files, data and blobs are on this machine anyway.
        complaints: errors and warnings in its console, and exceptions nobody caught.
        outside: every other address it asked for.
        dialogs: the words of dialogs that opened.
    """

    page: Page
    home: str = "file:"
    complaints: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        self.page.on("request", self._on_request)
        self.page.on("websocket", lambda socket: self._note(socket.url.replace("ws:", "http:", 1)))
        self.page.on("dialog", self._on_dialog)

    def trouble(self) -> list[str]:
        """All that a well-behaved page has none of, one line each."""
        ran = [frame.url for frame in self.page.frames if frame.evaluate(f"window.{SENTINEL} !== undefined")]
        return [
            *self.complaints,
            *(f"asked for {address}" for address in self.outside),
            *(f"opened a dialog: {text}" for text in self.dialogs),
            *(f"ran the script of a name in {address}" for address in ran),
        ]

    def _on_console(self, message: ConsoleMessage) -> None:
        # JupyterLab warns of plug-ins that take over five seconds to start: that is the machine's load, not a fault.
        if message.type in {"error", "warning"} and not SLOW_START.search(message.text):
            self.complaints.append(f"console {message.type}: {message.text}")

    def _on_request(self, request: Request) -> None:
        self._note(request.url)

    def _note(self, address: str) -> None:
        if not address.startswith((self.home, "file:", "data:", "blob:", "about:")):
            self.outside.append(address)

    def _on_dialog(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()


@contextmanager
def open_chromium() -> Iterator[Browser]:
    """This machine's own Chromium; nothing is downloaded."""
    from playwright.sync_api import sync_playwright  # only in the development lock; tests/browser skips without it

    options = [*OPTIONS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]  # root's Chromium has no sandbox
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=options)
        try:
            yield browser
        finally:
            browser.close()


def open_page(browser: Browser, *, home: str = "file:", window: tuple[int, int] = WINDOW) -> Watched:
    """An empty page with a profile of its own; close it with ``page.context.close()``."""
    context = browser.new_context(viewport={"width": window[0], "height": window[1]})
    return Watched(context.new_page(), home)
