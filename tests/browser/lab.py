"""JupyterLab as ``make lab`` starts it, and one of its notebooks in Chromium, used as a person does."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import nbformat

from tests.browser.chromium import PATIENCE_MS, Watched

if TYPE_CHECKING:
    from playwright.sync_api import Locator

ROOT = Path(__file__).parents[2]
# Loaded by the server and by every kernel it starts: whom they try to reach beyond this machine goes into a file.
_LISTENER = """
import os, sys

_NEAR = ("127.", "::1", "localhost", "0.0.0.0")

def _note(event, given):
    if event == "socket.connect" and isinstance(given[1], tuple):
        host = given[1][0]
    elif event == "socket.getaddrinfo":
        host = given[0]
    else:
        return
    host = host.decode("utf-8", "replace") if isinstance(host, bytes) else str(host or "127.0.0.1")
    if not host.startswith(_NEAR) and host != os.uname().nodename:
        with open({path!r}, "a") as stream:
            stream.write(f"{{os.path.basename(sys.argv[0])}}: {{event}} {{host}}\\n")

sys.addaudithook(_note)
"""
_KERNEL = """() => [...document.querySelectorAll("#jp-main-statusbar span")]
  .some(item => /^(?!No Kernel).+ \\| Idle$/.test(item.textContent))"""
# A cell that waits or runs shows [*]; one that is out of sight may show no number.
_ALL_RAN = """() => {
  const prompts = [...document.querySelectorAll(".jp-CodeCell .jp-InputArea-prompt")].map(one => one.textContent);
  const failed = document.querySelector(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']");
  return !prompts.some(text => text.includes("*")) && (failed || /\\d/.test(prompts.at(-1)));
}"""
_FINGERPRINTS = """() => [...document.querySelectorAll(".js-plotly-plot")].map(div =>
  [...div.querySelectorAll("path.js-line, .point path, .points path, .errorbars path")]
    .map(path => path.getAttribute("d") + (path.getAttribute("transform") ?? "")).join(" "))"""


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab.

    Attributes:
        address: without the token.
        token: what lets a browser in.
        notebooks: the folder it shows: a copy, so that no committed notebook is ever changed.
        outside: a file with a line for each attempt of the server or a kernel to reach beyond this machine.
    """

    address: str
    token: str
    notebooks: Path
    outside: Path

    def reached_outside(self) -> list[str]:
        """Whom the server and its kernels tried to reach beyond this machine."""
        return self.outside.read_text().splitlines() if self.outside.exists() else []


@contextmanager
def start_lab(folder: Path, environment: Mapping[str, str]) -> Iterator[Lab]:
    """JupyterLab on a copy of the notebooks in ``folder``, with nothing of the user's own settings."""
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    lab = Lab(f"http://127.0.0.1:{_free_port()}", secrets.token_hex(16), folder / "notebooks", folder / "outside.txt")
    listener = folder / "listener" / "sitecustomize.py"
    listener.parent.mkdir()
    listener.write_text(_LISTENER.format(path=str(lab.outside)))
    own = {f"JUPYTER_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"IPYTHONDIR": str(folder / "ipython"), "HOME": str(folder), "PYTHONPATH": f"{listener.parent}:{ROOT}"}
    log = folder / "lab.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            _command(lab), cwd=folder, env={**os.environ, **environment, **own}, stdout=stream, stderr=stream
        )
    try:
        _wait_until_it_answers(lab, process, log)
        yield lab
    finally:
        process.terminate()  # which ends its kernels too
        process.wait(60)


def _command(lab: Lab) -> list[str]:
    """What ``make lab`` does, with this environment's own programs, and without a window."""
    shown = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", f"VENV={sys.prefix}", "lab"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    begin = shown.find(f"{sys.prefix}/bin/jupyter lab ")
    assert begin >= 0, f"make lab starts no jupyter lab:\n{shown}"
    command = shlex.split(shown[begin:].replace("\\\n", " "))
    port = lab.address.rpartition(":")[2]
    options = ["--no-browser", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    return [*command, *options, f"--IdentityProvider.token={lab.token}", *(["--allow-root"] * (os.geteuid() == 0))]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_it_answers(lab: Lab, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + PATIENCE_MS / 1000
    while process.poll() is None and time.monotonic() < end:
        try:
            with urlopen(f"{lab.address}/api?token={lab.token}"):
                return
        except URLError:
            time.sleep(0.1)
    raise AssertionError(f"JupyterLab does not answer:\n{log.read_text()}")


class LabNotebook:
    """A notebook open in JupyterLab: a page, and what a person does with it."""

    def __init__(self, watched: Watched, lab: Lab, name: str) -> None:
        self.watched, self.page = watched, watched.page
        self._lab, self._file = lab, lab.notebooks / name
        self.page.goto(f"{lab.address}/lab/workspaces/{self._file.stem}/tree/{quote(name)}?token={lab.token}")
        self.wait_until_idle()

    def run_all(self) -> None:
        """Run > Run All Cells, and wait for the last one."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        self.page.wait_for_function(_ALL_RAN, polling=200)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Until the kernel is there and has nothing to do; before it is there, JupyterLab calls it idle too."""
        self.page.wait_for_function(_KERNEL, polling=200)

    def saved(self) -> nbformat.NotebookNode:
        """The notebook as JupyterLab writes it to the disk, with its outputs."""
        self.page.keyboard.press("Control+S")
        self.page.wait_for_function("() => !document.querySelector('.lm-TabBar-tab.lm-mod-current.jp-mod-dirty')")
        return nbformat.read(self._file, as_version=4)

    def fingerprints(self) -> list[str]:
        """Of each figure, the shapes of all its marks: equal exactly when it shows the same."""
        found: list[str] = self.page.evaluate(_FINGERPRINTS)
        return found

    def wait_for_change(self, before: list[str]) -> list[str]:
        """The new fingerprints, as soon as one differs and the kernel has come to rest."""
        self.page.wait_for_function(f"before => ({_FINGERPRINTS})().join() !== before.join()", arg=before, polling=200)
        self.wait_until_idle()
        return self.fingerprints()

    def control(self, description: str) -> Locator:
        """The widget with this label."""
        label = self.page.locator("label.widget-label", has_text=description)
        return self.page.locator(".jupyter-widgets.widget-inline-hbox", has=label).first

    def drag_slider(self, description: str, share: float) -> None:
        """Take the slider's handle by the mouse and move it to ``share`` of the way."""
        slider = self.control(description)
        slider.scroll_into_view_if_needed()
        handle, track = slider.locator(".noUi-handle").bounding_box(), slider.locator(".noUi-base").bounding_box()
        assert handle
        assert track
        height = handle["y"] + handle["height"] / 2
        self.page.mouse.move(handle["x"] + handle["width"] / 2, height)
        self.page.mouse.down()
        self.page.mouse.move(track["x"] + track["width"] * share, height, steps=4)
        self.page.mouse.up()
