import json
import re
from pathlib import Path

import plotly.graph_objects as go
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

from fvc_lib.analysis.pages.display import PLOTLY, figure_bundle
from fvc_lib.analysis.pages.report import clean_html, figure_html, render_notebook
from tests.analysis.conftest import notebook

HOSTILE = [
    "<script>alert(1)</script>after",
    "<script src=http://x/y.js>",
    "<img src=x onerror=alert(1)>",
    "<img src='http://x/y.png'>",
    "<IMG SRC=//x/y.png>",
    "<svg onload=alert(1)><image href='http://x/y.png'/></svg>",
    "<a href='javascript:alert(1)'>x</a>",
    "<iframe src='http://x'></iframe>",
    "<style>@import url(http://x/y.css)</style>",
    "<p style=\"background-image:url('http://x/y.png')\">x</p>",
    "<link rel=stylesheet href=http://x/y.css>",
    "<div id='section-1' onclick='x()'>",
    "<object data='http://x'></object><embed src=http://x><video src=http://x poster=http://x></video>",
    "<form action=http://x><input></form><base href=http://x><meta http-equiv=refresh content='0;url=http://x'>",
    "<!--<img src=x onerror=alert(1)>-->",
    "</div></div></details></section><h1>outside",
]


def rendered(path: Path, *cells: object) -> str:
    return render_notebook(notebook(path, *cells), "s1").body


def displayed(**data: object) -> object:
    return new_code_cell(
        "x", outputs=[new_output("display_data", data={k.replace("__", "/"): v for k, v in data.items()})]
    )


DANGERS = (
    "<script>", "alert(1)<", "onerror", "onload", "onclick", "javascript:", "http://x", "//x/", "<iframe", "@import",
    "<link", "<object", "<embed", "<video", "<form", "<base", "<meta", "<svg", "<style", "<input",
)  # fmt: skip


def test_hostile_html_is_harmless_wherever_it_stands(tmp_path: Path) -> None:
    cells = []
    for html in HOSTILE:
        cells += [new_markdown_cell(f"text\n\n{html}\n"), displayed(text__html=html), displayed(text__markdown=html)]
    for shown in (*map(clean_html, HOSTILE), rendered(tmp_path / "a.ipynb", *cells)):
        assert [danger for danger in DANGERS if danger in shown.lower()] == []


def test_hostile_text_is_shown_as_text(tmp_path: Path) -> None:
    text = "<script>alert(1)</script> & \x1b[31mred\x1b[0m"
    outputs = [
        new_output("stream", name="stdout", text=text),
        new_output("error", ename="E<b>", evalue=text, traceback=[text]),
        new_output("display_data", data={"text/plain": text}),
        new_output("display_data", data={"text/latex": text}),
    ]
    body = rendered(tmp_path / "a.ipynb", new_code_cell(f"x = '{text[:25]}'", outputs=outputs))
    assert "<script" not in body
    assert body.count("&lt;script&gt;") >= 4
    assert '<span class="ansi-red-fg">red</span>' in body


def test_a_stored_figure_becomes_a_div_and_its_data(tmp_path: Path) -> None:
    spec = {
        "data": [{"y": [1, float("nan")], "name": "</script><script>alert(1)</script>"}],
        "layout": {"width": 900, "height": 300},
    }
    data = {PLOTLY: spec, "text/html": "<p>other</p>"}
    first, second = (new_code_cell("x", outputs=[new_output("display_data", data=data)]) for _ in range(2))
    path = tmp_path / "a.ipynb"
    body = rendered(path, first, second)
    assert body.count('<div class="figure"') == 2
    assert 'id="s1-figure-1" style="height:300px"' in body
    assert body.count("</script>") == 2  # each element's own end and no other
    assert "NaN" not in body
    assert '"width": null' in body
    assert "<p>other</p>" not in body
    assert render_notebook(path, "s1").num_figures == 2


@pytest.mark.parametrize(
    ("name", "source", "title"),
    [
        ("04_fold_training_fold_3.ipynb", "# Fold `training` #\n\ntext", "Fold training, fold 3"),
        ("04_fold_training_fold_3.partial.ipynb", "# T", "T, fold 3"),
        ("05_results.ipynb", "no heading", "05_results"),
        ("a <b>.ipynb", "no # heading", "a <b>"),
    ],
)
def test_the_title_is_the_first_heading_with_the_fold(tmp_path: Path, name: str, source: str, title: str) -> None:
    path = tmp_path / name
    body = rendered(path, new_markdown_cell(source))
    assert render_notebook(path, "s1").title == title
    assert "<h1" not in body


def test_a_failed_cell_is_remembered_and_how_far_each_cell_came_is_told(tmp_path: Path) -> None:
    error = new_output("error", ename="ValueError", evalue="bad\nvalue", traceback=[])
    cells = [
        new_code_cell(source, outputs=outputs, metadata={"papermill": {"status": status}})
        for source, outputs, status in (("x", [error], "failed"), ("y", [], "running"), ("z", [], "pending"))
    ]
    path = tmp_path / "a.ipynb"
    body = rendered(path, *cells, new_code_cell("", metadata={"papermill": {"status": "pending"}}))
    whole = render_notebook(path, "s1")
    assert (whole.error, whole.num_never_ran, whole.num_code_cells) == ("ValueError: bad value", 1, 3)
    assert body.index("This cell was running.") < body.index("This cell never ran.")


def test_links_lead_to_the_runs_logs_and_nowhere_else(tmp_path: Path) -> None:
    refused = (
        "../logs/../../x", "../../logs/x", "../tables/x", "/etc/passwd", "../logs/%2e%2e/x", "../logs/..%2Fx",
        "../logs/..\\\\x",
    )  # fmt: skip
    hrefs = ("../logs/outputs/03/cell_01.txt", *refused)
    body = rendered(tmp_path / "a.ipynb", *(displayed(text__html=f'<a href="{href}">x</a>') for href in hrefs))
    assert re.findall('href="([^"]*)"', body) == ["logs/outputs/03/cell_01.txt"]


def shown(figure: go.Figure) -> tuple[str, dict]:
    """A figure's HTML, and the layout that is drawn."""
    html = figure_html(figure_bundle(figure)[PLOTLY], "f")
    data = re.search(r'id="f-data">(.*)</script>', html)
    return html, json.loads(data[1])["layout"] if data else {}
