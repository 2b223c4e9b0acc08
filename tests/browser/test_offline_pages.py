"""Report, records and list of runs, opened from the disk: whole, drawn, linked, printable, and asking nobody anything.

The run they tell of has names that would like to be markup, script or SQL; see ``runs.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import OpenFile
from tests.browser.offline import draw_all, figures, settle, too_wide
from tests.browser.runs import FOREIGN, HOSTILE, Runs

pytestmark = pytest.mark.slow
WIDE, PHONE = (1200, 900), (390, 844)
PAPER = (688, 900)  # A4 less the margins of the style sheet, in CSS pixels
RECORDS = ("05_kfold_results", "06_analysis_dashboard", "07_memory_report")
# The report holds every record's figures; the other records' own pages differ from the first one's in nothing else.
PAGES = ["report", "index", RECORDS[0], *(pytest.param(name, marks=pytest.mark.long) for name in RECORDS[1:])]


def path_of(name: str, runs: Runs) -> Path:
    special = {"report": runs.shown.report_html, "index": runs.folder / "index.html"}
    return special.get(name, runs.shown.record_html(name))


@pytest.mark.fault(38, 39)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_drawn_fits_its_window_and_shows_names_as_text(open_file: OpenFile, runs: Runs, name: str) -> None:
    watched = open_file(path_of(name, runs), WIDE)
    draw_all(watched.page)
    text = watched.page.locator("body").inner_text()
    for window in (WIDE, PHONE):
        watched.page.set_viewport_size({"width": window[0], "height": window[1]})
        settle(watched.page)
        assert too_wide(watched.page) == [], window
        seen = figures(watched.page)
        assert bool(seen) == (name != "index")
        for figure in seen:
            assert figure["marks"] > 0 or figure["says_why"], figure
            assert figure["drawn_beyond"] <= 0.5, figure
            assert figure["room_beyond"] <= 0.5, figure
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
    assert too_wide(watched.page) == []
    for figure in figures(watched.page):
        assert figure["drawn_beyond"] <= 0.5, figure
        assert figure["room_beyond"] <= 0.5, figure
        assert figure["cut_texts"] == [], figure
    assert not watched.page.locator("nav.sections").is_visible()
    assert watched.trouble() == []


def test_links_between_the_pages_lead_where_they_say(open_file: OpenFile, runs: Runs) -> None:
    """Also into folders whose names are markup, or no UTF-8."""
    watched = open_file(runs.folder / "index.html")
    page = watched.page
    links = page.locator("a")
    assert links.count() == 2 * (1 + len(RECORDS))  # report and records of the shown and of the copied run
    for number, run in enumerate((runs.shown, runs.copied)):
        page.locator("tr", has_text=FOREIGN[:4] if number else "img src").locator("a", has_text="05").first.click()
        page.wait_for_url(run.record_html(RECORDS[0]).as_uri())
        page.locator("header a", has_text=run.run_id).click()
        page.wait_for_url(run.report_html.as_uri())
        page.locator(f"summary a[href$='{RECORDS[0]}.html']").click()
        page.locator("header a", has_text="all runs").click()
        page.wait_for_url((runs.folder / "index.html").as_uri())
    page.goto(runs.shown.report_html.as_uri())
    section = page.locator("nav.sections a").nth(2)
    section.click()
    page.wait_for_function("id => document.querySelector(id).open", arg=section.get_attribute("href"))
    assert watched.trouble() == []
