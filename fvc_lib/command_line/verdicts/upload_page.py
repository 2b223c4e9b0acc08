"""``run_notebooks.py verdict-page``: notebook 30 as a page for people who do not program, by voila."""

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import webbrowser
from pathlib import Path

import click
import nbformat
from jupyter_core.paths import jupyter_path

from fvc_lib import CHECKOUT
from fvc_lib.command_line.models import find_model, verdict_detector
from fvc_lib.command_line.run_command import NOTEBOOKS
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.tasks import VERDICTS

_TEMPLATE = "fvc"
RECORD_ONLY = "record-only"  # tag of cells that say nothing to somebody who drops a video


@click.command("verdict-page", short_help="A page on which anybody can drop a video and read its verdict.")
@click.argument("model", default="latest")
@click.option("--port", type=click.IntRange(0, 65535), default=8866, show_default=True, help="0: any that is free.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="0.0.0.0 lets other machines in: whoever has the token."
)
@click.option("--limit-mb", type=click.IntRange(min=1), default=500, show_default=True, help="Largest video, in MB.")
@click.option("--error-rate", default=0.1, show_default=True, metavar="SHARE",
              help="Share of the reals that may be called fake, and of the fakes that may be called real.")  # fmt: skip
@click.option("--map-minutes", type=click.FloatRange(min=0), default=3.0, show_default=True, metavar="MINUTES",
              help="So long may a video's maps of where it looks fake take; 0: none.")  # fmt: skip
@click.option("--file-seconds", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
              help="So long may one file take; without: 60, and 1 for each MB of it.")  # fmt: skip
@click.option("--allow-code", is_flag=True, help="Let a bundle's own network run: read its file first.")
@click.option("--final", is_flag=True, help="Ask the run's one network of all groups (train_final), not the folds'.")
@click.option("--no-browser", is_flag=True, help="Print the address only.")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Runs folder, where it is not the default.")
def verdict_page(
    model: str,
    port: int,
    host: str,
    limit_mb: int,
    error_rate: float,
    map_minutes: float,
    file_seconds: float | None,
    allow_code: bool,
    final: bool,
    no_browser: bool,
    runs_dir: Path | None,
) -> None:
    """Show a page on which videos are dropped, judged by MODEL, and their pages read and downloaded.

    MODEL is 'latest', a run id, a part of one, a run folder, or an exported bundle. The page is seen from this machine
    only, unless --host says otherwise, and asks for a token, which stands in the address that is printed. Every
    visitor has a process of their own; what they drop is deleted when it was judged. Ctrl-C ends it all.

    \b
    python run_notebooks.py verdict-page
    python run_notebooks.py verdict-page bundle_run_20260101_120000_0a1b2c3d --port 9000 --limit-mb 2000
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    from fvc_lib.tasks.video.verdicts.rule import rule_of  # torch takes a second to load

    runs = runs_dir or Path(resolve_config().runs_dir)
    rule_of(error_rate)
    given = find_model(runs, model)
    # What is wrong with it is said here, and not to a visitor.
    verdict_detector(given, allow_code=allow_code, final=final)
    port = _free_port(host, port)
    parameters = {
        "run_dir": str(given),
        "error_rate": error_rate,
        "map_minutes": map_minutes,
        "file_seconds": file_seconds or 0.0,
        "allow_code": allow_code,
        "final_network": final,
        "upload_limit_mb": limit_mb,
    }
    token = secrets.token_urlsafe(24)
    with tempfile.TemporaryDirectory(prefix="fvc_verdict_page_") as folder:
        notebook = _page_notebook(Path(folder), parameters)
        shown_host = "127.0.0.1" if host in {"0.0.0.0", "::"} else host
        address = f"http://{shown_host}:{port}/?token={token}"
        click.echo(f"model    {given}\naddress  {address}\nCtrl-C ends it.")
        command = [
            sys.executable, "-m", "voila", str(notebook), f"--Voila.ip={host}", f"--port={port}",
            "--Voila.auto_token=True", "--Voila.port_retries=0", f"--template={_TEMPLATE}", "--no-browser",
            "--show_tracebacks=False",
        ]  # fmt: skip
        path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
        jupyter = os.pathsep.join(filter(None, [_offline_template(Path(folder)), os.environ.get("JUPYTER_PATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "JUPYTER_PATH": jupyter, "FVC_RUNS_DIR": str(runs)}
        environment["JUPYTER_TOKEN"] = token  # anybody on the machine can read a command line
        process = subprocess.Popen(command, cwd=folder, env=environment)
        if not no_browser:  # voila's own would open the page without the token
            opener = Path(folder) / "open.html"
            opener.write_text(f'<meta http-equiv="refresh" content="0; url={address}">', encoding="utf-8")
            threading.Thread(target=_open_when_up, args=(process, shown_host, port, opener), daemon=True).start()
        with contextlib.ExitStack() as stack:
            for number in (signal.SIGTERM, signal.SIGINT):
                before = signal.signal(number, lambda *_: process.terminate())
                stack.callback(signal.signal, number, before)
            code = process.wait()
    if code not in {0, -signal.SIGTERM, -signal.SIGINT}:
        raise UsageError(f"voila ended with exit code {code}; what it said stands above.")


def _free_port(host: str, port: int) -> int:
    """``port``, or one that is free for 0.

    Raises:
        UsageError: it is taken, or the host is none of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port)[0][0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise UsageError(
            f"--host {host} --port {port}: {error.strerror or error}. Give another --port; 0 takes any that is free."
        ) from error


def _open_when_up(process: subprocess.Popen[bytes], host: str, port: int, page: Path) -> None:
    """Open ``page``, which leads to the address, in a browser as soon as ``process`` takes connections."""
    while process.poll() is None:
        try:
            socket.create_connection((host, port), timeout=1).close()
        except OSError:
            time.sleep(0.2)
        else:
            webbrowser.open(page.as_uri())
            return


def _offline_template(folder: Path) -> str:
    """Voila's own template without the style sheets that it asks a server for; returns a folder of ``JUPYTER_PATH``.

    Raises:
        UsageError: voila has no such template any more.
    """
    for place in jupyter_path("voila", "templates", "lab", "index.html.j2"):
        if Path(place).is_file():
            text = re.sub(r"<link[^>]*https?://[^>]*>", "", Path(place).read_text(encoding="utf-8"))
            target = folder / "jupyter" / "voila" / "templates" / _TEMPLATE
            target.mkdir(parents=True)
            (target / "index.html.j2").write_text(text, encoding="utf-8")
            (target / "conf.json").write_text('{"base_template": "lab"}', encoding="utf-8")
            return str(folder / "jupyter")
    raise UsageError("voila's template 'lab' is not installed. Install what FVC needs anew: make setup")


def _page_notebook(folder: Path, parameters: dict[str, object]) -> Path:
    """Notebook 30 with these parameters and without the cells that belong to its record alone."""
    from papermill.iorw import load_notebook_node  # papermill takes a while to load
    from papermill.parameterize import parameterize_notebook

    notebook = parameterize_notebook(load_notebook_node(str(NOTEBOOKS / f"{VERDICTS}.ipynb")), parameters)
    notebook.cells = [cell for cell in notebook.cells if RECORD_ONLY not in cell.metadata.get("tags", [])]
    path = folder / f"{VERDICTS}.ipynb"
    nbformat.write(notebook, path)
    return path
