"""Report and list of runs, opened from the disk: whole, drawn, linked, printable, and asking nobody anything.

The run they tell of has names that would like to be markup, script or SQL; see ``runs.py``.
"""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output, writes

from fvc_lib.analysis.pages.report import write_report
from tests.browser.chromium import WINDOW
from tests.browser.conftest import OpenPage
from tests.browser.offline import draw_all, figures, flaws, settle
from tests.browser.runs import HOSTILE, Runs

pytestmark = pytest.mark.long
PHONE = (390, 844)


def resize(page: Any, window: tuple[int, int]) -> None:
    page.set_viewport_size({"width": window[0], "height": window[1]})
    settle(page)


@pytest.mark.fault(38, 39)
@pytest.mark.parametrize("name", ["report", "index"])
def test_a_page_is_drawn_fits_its_window_and_shows_names_as_text(open_page: OpenPage, runs: Runs, name: str) -> None:
    is_report = name == "report"
    watched = open_page(runs.shown.report_html if is_report else runs.folder / "index.html")
    draw_all(watched.page)
    text = watched.page.locator("body").inner_text()
    assert bool(figures(watched.page)) == is_report
    for window in (PHONE, WINDOW):
        resize(watched.page, window)
        assert flaws(watched.page) == [], window
    assert ("True positive rate" in "".join(watched.page.locator(".g-ytitle").all_text_contents())) == is_report
    assert watched.trouble() == []
    assert "alert(" in text
    assert not is_report or all(hostile in text for hostile in HOSTILE[:3])


@pytest.fixture
def canary() -> Iterator[tuple[str, list[str]]]:
    """Return the address of a server and the list of paths it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_nothing_that_a_notebook_smuggled_in_runs_or_is_fetched(open_page: OpenPage, canary, tmp_path: Path) -> None:
    address, asked = canary
    smuggled = (
        f"<img src='{address}/img.png'><script>document.title='owned'</script><script src='{address}/x.js'></script>"
        f"<link rel=stylesheet href='{address}/x.css'><style>@import '{address}/y.css';</style>"
        f"<p style=\"background:url('{address}/bg.png')\">x</p><iframe src='{address}/frame'></iframe>"
    )
    image = {"source": f"{address}/plot.png", "x": 0, "y": 1, "sizex": 1, "sizey": 1}
    bundles = (
        {"text/html": smuggled},
        {"application/javascript": "document.title='owned'"},
        {"image/svg+xml": f"<svg xmlns='http://www.w3.org/2000/svg'><image href='{address}/svg.png'/></svg>"},
        {"application/vnd.plotly.v1+json": {"data": [{"y": [1, 2]}], "layout": {"images": [image]}}},
    )
    outputs = [new_output("display_data", data=bundle) for bundle in bundles]
    cells = [new_markdown_cell(f"# N\n\n{smuggled}\n\n![x]({address}/md.png)"), new_code_cell("x", outputs=outputs)]
    notebook = tmp_path / "05_kfold_results.ipynb"
    notebook.write_text(writes(new_notebook(cells=cells)))
    write_report([notebook], tmp_path / "report.html", title="honest")
    watched = open_page(tmp_path / "report.html")
    draw_all(watched.page)
    assert asked == []
    assert watched.page.title() == "honest"
