"""Report, records and list of runs, opened from the disk: whole, drawn, linked, printable, and asking nobody anything.

The run they tell of has names that would like to be markup, script or SQL; see ``runs.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import OpenFile
from tests.browser.offline import cut_tables, draw_all, figures, flaws, settle
from tests.browser.runs import FOREIGN, HOSTILE, Runs

pytestmark = pytest.mark.long
WIDE, PHONE = (1200, 900), (390, 844)
PAPER = (688, 900)  # A4 less the margins of the style sheet, in CSS pixels
RECORD = "05_kfold_results"
PAGES = ["report", "index", RECORD]


def path_of(name: str, runs: Runs) -> Path:
    special = {"report": runs.shown.report_html, "index": runs.folder / "index.html"}
    return special.get(name, runs.shown.record_html(name))


@pytest.mark.fault(38, 39)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_drawn_fits_its_window_and_shows_names_as_text(open_file: OpenFile, runs: Runs, name: str) -> None:
    watched = open_file(path_of(name, runs), WIDE)
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
    assert links.count() == 2 * 2  # report and record of the shown and of the copied run
    for number, run in enumerate((runs.shown, runs.copied)):
        page.locator("tr", has_text=FOREIGN[:4] if number else "img src").locator("a", has_text="05").first.click()
        page.wait_for_url(run.record_html(RECORD).as_uri())
        page.locator("header a", has_text=run.run_id).click()
        page.wait_for_url(run.report_html.as_uri())
        page.locator(f"summary a[href$='{RECORD}.html']").click()
        page.locator("header a", has_text="all runs").click()
        page.wait_for_url((runs.folder / "index.html").as_uri())
    page.goto(runs.shown.report_html.as_uri())
    section = page.locator("nav.sections a").last
    section.click()
    page.wait_for_function("id => document.querySelector(id).open", arg=section.get_attribute("href"))
    assert watched.trouble() == []
