"""JupyterLab as ``make lab`` starts it, and one of its notebooks in Chromium, used as a person does."""

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
from typing import Any
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import nbformat
import pytest

from tests.browser.chromium import PATIENCE_MS, Watched

ROOT = Path(__file__).parents[2]
# The server and every kernel it starts load this; it notes every host beyond this machine that they try to reach.
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
# A cell that waits or runs shows [*]; one out of sight may show no number.
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
        address: Its address, without the token.
        token: Lets a browser in.
        notebooks: A copy of the committed notebooks, which keeps outputs, below the folder it shows.
        outside: A file with a line for each attempt of the server or a kernel to reach beyond this machine.
    """

    address: str
    token: str
    notebooks: Path
    outside: Path

    def address_of(self, name: str) -> str:
        """Return the address of a notebook, with the token."""
        return f"{self.address}/lab/workspaces/{Path(name).stem}/tree/copies/{quote(name)}?token={self.token}"

    def reached_outside(self) -> list[str]:
        """Return the hosts beyond this machine that the server and its kernels tried to reach."""
        return self.outside.read_text().splitlines() if self.outside.exists() else []


@contextmanager
def start_lab(folder: Path, environment: Mapping[str, str]) -> Iterator[Lab]:
    """Start JupyterLab on a copy of the notebooks in ``folder``, with nothing of the user's own settings."""
    shutil.copytree(ROOT / "notebooks", folder / "copies")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lab = Lab(f"http://127.0.0.1:{port}", secrets.token_hex(16), folder / "copies", folder / "outside.txt")
    listener = folder / "listener" / "sitecustomize.py"
    listener.parent.mkdir()
    listener.write_text(_LISTENER.format(path=str(lab.outside)))
    own = {f"JUPYTER_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"IPYTHONDIR": str(folder / "ipython"), "HOME": str(folder)}
    own["PYTHONPATH"] = os.pathsep.join(map(str, (listener.parent, ROOT, ROOT / ".ci")))
    options = ["--no-browser", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    options += [f"--IdentityProvider.token={lab.token}", *(["--allow-root"] * (os.geteuid() == 0))]
    shown = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", f"VENV={sys.prefix}", "lab"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    _, command, its_options = shown.replace("\\\n", " ").partition(f"{sys.prefix}/bin/jupyter lab ")
    assert command, f"make lab starts no jupyter lab:\n{shown}"
    command = shlex.split(command + its_options)  # of ``make lab`` with the programs of this environment
    with (folder / "lab.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *options], cwd=folder, env={**os.environ, **environment, **own}, stdout=log, stderr=log
        )
    try:
        end = time.monotonic() + PATIENCE_MS / 1000
        while not _answers(lab):
            if process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"JupyterLab does not answer:\n{(folder / 'lab.log').read_text()}")
            time.sleep(0.1)
        yield lab
    finally:
        process.terminate()  # which ends its kernels too
        process.wait(60)


def _answers(lab: Lab) -> bool:
    try:
        with urlopen(f"{lab.address}/api?token={lab.token}"):
            return True
    except URLError:
        return False


@dataclass(frozen=True)
class LabNotebook:
    """A notebook open in JupyterLab, and what a person does with it."""

    page: Any
    watched: Watched
    file: Path

    def run_all(self) -> None:
        """Choose Run > Run All Cells and wait for the last one."""
        self.wait_until_idle()
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        self.page.wait_for_function(_ALL_RAN, polling=200)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Wait until the kernel is there and has nothing to do; JupyterLab calls a missing kernel idle too."""
        self.page.wait_for_function(_KERNEL, polling=200)

    def saved(self) -> nbformat.NotebookNode:
        """Save and return the notebook, with its outputs."""
        self.page.keyboard.press("Control+S")
        self.page.wait_for_function("() => !document.querySelector('.lm-TabBar-tab.lm-mod-current.jp-mod-dirty')")
        return nbformat.read(self.file, as_version=4)

    def fingerprints(self, number: int = 0) -> list[str]:
        """Return the shapes of all marks of each figure, once ``number`` are drawn: equal if they show the same."""
        self.page.wait_for_function(f"number => ({_FINGERPRINTS})().length >= number", arg=number, polling=200)
        return self.page.evaluate(_FINGERPRINTS)

    def wait_for_change(self, before: list[str]) -> list[str]:
        """Return the new fingerprints as soon as one differs and the kernel has come to rest."""
        self.page.wait_for_function(f"before => ({_FINGERPRINTS})().join() !== before.join()", arg=before, polling=200)
        self.wait_until_idle()
        return self.fingerprints()

    def control(self, description: str) -> Any:
        """Return the widget with this label."""
        label = self.page.locator("label.widget-label", has_text=description)
        return self.page.locator(".jupyter-widgets.widget-inline-hbox", has=label).first

    def drag_slider(self, description: str, share: float) -> None:
        """Move the slider's handle with the mouse to ``share`` of the way."""
        slider = self.control(description)
        slider.scroll_into_view_if_needed()
        handle, track = slider.locator(".noUi-handle").bounding_box(), slider.locator(".noUi-base").bounding_box()
        height = handle["y"] + handle["height"] / 2
        self.page.mouse.move(handle["x"] + handle["width"] / 2, height)
        self.page.mouse.down()
        self.page.mouse.move(track["x"] + track["width"] * share, height, steps=4)
        self.page.mouse.up()
