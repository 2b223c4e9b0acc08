import json
import re

import plotly.graph_objects as go
import pytest

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.pages.display import PLOTLY, figure_bundle
from fvc_lib.analysis.pages.notebook_html import figure_html

HOSTILE = "</p><script>alert('x')</script><img src=x onerror=alert(1)>"


def shown(figure: go.Figure) -> tuple[str, dict]:
    """A figure's HTML, and the layout that is drawn."""
    html = figure_html(figure_bundle(figure)[PLOTLY], "f")
    data = re.search(r'id="f-data">(.*)</script>', html)
    return html, json.loads(data[1])["layout"] if data else {}


def test_the_finding_and_its_basis_are_text_above_the_figure_which_keeps_its_plot_as_high() -> None:
    figure = theme.figure("word " * 40, "n = 3 videos").add_scatter(x=[1], y=[2])
    html, layout = shown(figure)
    assert '<p class="finding">word word' in html
    assert '<p class="basis">n = 3 videos</p>' in html
    assert "title" not in layout
    before = figure.layout
    assert layout["height"] - layout["margin"]["t"] == before.height - before.margin.t
    assert layout["margin"]["t"] < before.margin.t


def test_a_legend_in_the_place_of_the_title_moves_to_the_edge() -> None:
    figure = theme.figure("Curves", "n = 3").add_scatter(x=[1], y=[2])
    figure.update_layout(legend={"yref": "container", "y": 0.9})
    assert shown(figure)[1]["legend"]["y"] == 1


def test_nothing_to_show_is_said_without_an_empty_plot() -> None:
    html, _ = shown(theme.nothing_to_show("Slices", "None are recorded."))
    assert html == '<p class="finding">Slices: nothing to show</p><p class="basis">None are recorded.</p>'


@pytest.mark.fault(39)
def test_a_title_that_would_like_to_be_markup_is_text() -> None:
    ours, _ = shown(theme.figure(HOSTILE, HOSTILE).add_scatter(x=[1], y=[2]))
    foreign = theme.figure("x", "y").add_scatter(x=[1], y=[2])
    foreign.update_layout(title={"text": HOSTILE, "subtitle": {"text": HOSTILE}})  # written without our escaping
    for html in (ours, shown(foreign)[0]):
        before_data = html.split('<script type="application/json"')[0]
        assert "<script" not in before_data
        assert "<img" not in before_data
