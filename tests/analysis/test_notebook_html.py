import os
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output, new_raw_cell

from fvc_lib.analysis.pages.display import PLOTLY
from fvc_lib.analysis.pages.notebook_html import WIDGET, clean_html, render_notebook
from fvc_lib.services.errors import DataError

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
    path.write_text(nbformat.writes(new_notebook(cells=list(cells))), encoding="utf-8")
    return render_notebook(path, "s1").body


def displayed(**data: object) -> object:
    return new_code_cell(
        "x", outputs=[new_output("display_data", data={k.replace("__", "/"): v for k, v in data.items()})]
    )


def assert_harmless(html: str) -> None:
    lowered = html.lower()
    for danger in (
        "<script>",
        "alert(1)<",
        "onerror",
        "onload",
        "onclick",
        "javascript:",
        "http://x",
        "//x/",
        "<iframe",
        "@import",
    ):
        assert danger not in lowered, (danger, html)
    for tag in ("link", "object", "embed", "video", "form", "base", "meta", "svg", "style", "input"):
        assert f"<{tag}" not in lowered


@pytest.mark.parametrize("html", HOSTILE)
def test_hostile_html_is_harmless_wherever_it_stands(tmp_path: Path, html: str) -> None:
    assert_harmless(clean_html(html))
    assert_harmless(rendered(tmp_path / "a.ipynb", new_markdown_cell(f"text\n\n{html}\n")))
    assert_harmless(rendered(tmp_path / "a.ipynb", displayed(text__html=html)))
    assert_harmless(rendered(tmp_path / "a.ipynb", displayed(text__markdown=html)))


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


def test_tables_and_their_looks_survive_cleaning() -> None:
    html = '<table class="fvc-table"><tr><td class="number" colspan="2" style="color: red;">1</td></tr></table>'
    assert clean_html(html).replace("<tbody>", "").replace("</tbody>", "") == html
    image = '<img alt="clip" src="data:image/png;base64,AAAA">'
    assert 'src="data:image/png;base64,AAAA"' in clean_html(image)
    assert "https://doi.org/1" in clean_html('<a href="https://doi.org/1">source</a>')


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
    assert '"width"' not in body
    assert "<p>other</p>" not in body
    assert render_notebook(path, "s1").num_figures == 2


def test_widgets_without_a_kernel_are_their_plain_text(tmp_path: Path) -> None:
    data = {WIDGET: {"model_id": "1"}, "text/html": "<b>gone</b>", "text/plain": "Dashboard of run 1"}
    body = rendered(tmp_path / "a.ipynb", new_code_cell("x", outputs=[new_output("display_data", data=data)]))
    assert "Dashboard of run 1" in body
    assert "gone" not in body


def test_code_is_folded_and_parameters_are_named(tmp_path: Path) -> None:
    cells = [
        new_code_cell("a = 1\nb = 2", metadata={"tags": ["parameters"]}),
        new_code_cell("a = 3", metadata={"tags": ["injected-parameters"]}),
        new_code_cell("print(a)"),
        new_code_cell(""),
        new_raw_cell("<b>raw</b>"),
        new_markdown_cell("| **Purpose** | all |", metadata={"tags": ["folded"]}),
    ]
    body = rendered(tmp_path / "a.ipynb", *cells)
    for label in ("Parameters, 2 lines", "Parameters set by the run, 1 line", "Code, 1 line", "About this record"):
        assert f'<details class="code"><summary>{label}</summary>' in body
    assert body.count("<details") == 4
    assert "raw" not in body


def test_a_flood_of_text_is_cut_and_counted(tmp_path: Path) -> None:
    output = new_output("stream", name="stdout", text="x" * 150_000)
    body = rendered(tmp_path / "a.ipynb", new_code_cell("x", outputs=[output]))
    assert "50,000 more characters are in the executed notebook." in body
    assert len(body) < 110_000


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


def test_a_failed_cell_is_remembered(tmp_path: Path) -> None:
    cell = new_code_cell("x", outputs=[new_output("error", ename="ValueError", evalue="bad\nvalue", traceback=[])])
    path = tmp_path / "a.ipynb"
    rendered(path, cell)
    assert render_notebook(path, "s1").error == "ValueError: bad value"


@pytest.mark.parametrize("content", [b"", b"{", b'{"cells": 3}', b"\xff\xfe"])
def test_what_is_no_notebook_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / os.fsdecode(b"rec\xfford.ipynb")
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"rec\\xfford.ipynb"):
        render_notebook(path, "s1")
    with pytest.raises(DataError, match=r"gone\.ipynb: No such file"):
        render_notebook(tmp_path / "gone.ipynb", "s1")
