"""Report and list of runs, opened from the disk: whole, drawn, linked, printable, and asking nobody anything.

The run they tell of has names that would like to be markup, script or SQL; see ``runs.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output, writes

from fvc_lib.analysis.pages.report import write_report
from tests.browser.conftest import OpenFile
from tests.browser.offline import cut_tables, draw_all, figures, flaws, settle
from tests.browser.runs import FOREIGN, HOSTILE, Runs

pytestmark = pytest.mark.long
WIDE, PHONE = (1200, 900), (390, 844)
PAPER = (688, 900)  # A4 less the margins of the style sheet, in CSS pixels


@pytest.mark.fault(38, 39)
@pytest.mark.parametrize("name", ["report", "index"])
def test_a_page_is_drawn_fits_its_window_and_shows_names_as_text(open_file: OpenFile, runs: Runs, name: str) -> None:
    watched = open_file(runs.shown.report_html if name == "report" else runs.folder / "index.html", WIDE)
    draw_all(watched.page)
    text = watched.page.locator("body").inner_text()
    assert bool(figures(watched.page)) == (name != "index")
    for window in (WIDE, PHONE):
        watched.page.set_viewport_size({"width": window[0], "height": window[1]})
        settle(watched.page)
        assert flaws(watched.page) == [], window
        assert [text for figure in figures(watched.page) for text in figure["cut_texts"]] == [], window
    watched.page.set_viewport_size({"width": WIDE[0], "height": WIDE[1]})
    settle(watched.page)
    assert ("Scored by" in "".join(watched.page.locator(".g-ytitle").all_text_contents())) == (name != "index")
    assert watched.trouble() == []
    assert "alert(" in text
    if name != "index":
        for hostile in HOSTILE[:3]:
            assert hostile in text


def test_a_printed_report_shows_every_section_and_every_figure_unclipped(
    open_file: OpenFile, runs: Runs, tmp_path
) -> None:
    watched = open_file(runs.shown.report_html)
    watched.page.pdf(path=tmp_path / "report.pdf", prefer_css_page_size=True)  # nobody has scrolled or opened anything
    assert watched.page.locator("details.section:not([open])").count() == 0
    assert all(figure["width"] > 0 for figure in figures(watched.page))
    watched.page.emulate_media(media="print")
    watched.page.set_viewport_size({"width": PAPER[0], "height": PAPER[1]})
    settle(watched.page)
    assert flaws(watched.page) == []
    assert [figure["cut_texts"] for figure in figures(watched.page) if figure["cut_texts"]] == []
    assert cut_tables(watched.page) == []
    assert not watched.page.locator("nav.sections").is_visible()
    assert watched.trouble() == []


def test_links_between_the_pages_lead_where_they_say(open_file: OpenFile, runs: Runs) -> None:
    """Also into folders whose names are markup, or no UTF-8."""
    watched = open_file(runs.folder / "index.html")
    page = watched.page
    links = page.locator("a")
    assert links.count() == 2  # the report of the shown and of the copied run
    for number, run in enumerate((runs.shown, runs.copied)):
        row = page.locator("tr", has_text=FOREIGN[:4] if number else "img src")
        row.locator("a").first.click()
        page.wait_for_url(run.report_html.as_uri())
        page.locator("header a", has_text="all runs").click()
        page.wait_for_url((runs.folder / "index.html").as_uri())
    page.goto(runs.shown.report_html.as_uri())
    section = page.locator("nav.sections a").last
    section.click()
    page.wait_for_function("id => document.querySelector(id).open", arg=section.get_attribute("href"))
    assert watched.trouble() == []


@pytest.fixture
def canary() -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and every path it was asked for."""
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


def test_nothing_that_a_notebook_smuggled_in_runs_or_is_fetched(open_file: OpenFile, canary, tmp_path: Path) -> None:
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
    watched = open_file(tmp_path / "report.html")
    draw_all(watched.page)
    assert asked == []
    assert watched.page.title() == "honest"
