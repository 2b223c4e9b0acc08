import re
from html import unescape

import duckdb
import polars as pl
import pytest
from hypothesis import given, settings, strategies as st

from fvc_lib.analysis.pages.display import HtmlTable, only_shows

HOSTILE = ["<script>alert(1)</script>", "a'b\"c", "x\ny", "&lt;", "]]>", "{{ 7*7 }}"]


def rows_of(table: HtmlTable) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", table._repr_html_(), re.DOTALL)
    return [[unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)] for row in rows]


@given(st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=12)), min_size=1, max_size=6))
@settings(max_examples=8, deadline=None)
def test_any_text_is_shown_as_text(values: list[str]) -> None:
    values = [value for value in values if value.isprintable() and value == " ".join(value.split())] or ["x"]
    table = HtmlTable(pl.DataFrame({"<b>": values}), caption="<i>caption")
    assert [row[0] for row in rows_of(table)[1:]] == values
    tags = set(re.findall(r"<([a-z]+)", table._repr_html_()))
    assert tags == {"table", "caption", "thead", "tbody", "tr", "th", "td"}


def test_numbers_carry_units_and_missing_ones_say_so() -> None:
    frame = pl.DataFrame(
        {"peak_rss_bytes": [812_000_000, None], "duration_seconds": [185.0, 2.0], "fake_share": [0.5, 0.25],
         "num_videos": [12_000, 1], "fold": [1000, 1], "roc_auc": [0.81249, float("nan")], "ok": [True, None]}
    )  # fmt: skip
    assert rows_of(HtmlTable(frame)) == [
        ["Peak memory", "Duration", "Fake (%)", "Videos", "Fold", "ROC AUC", "Ok"],
        ["812 MB", "3 min 05 s", "50.0", "12,000", "1000", "0.812", "yes"],
        ["not recorded", "2.0 s", "25.0", "1", "1", "undefined", "not recorded"],
    ]


def test_numbers_with_intervals_are_numbers_too() -> None:
    frame = pl.DataFrame({"by_video": ["0.994 [0.963, 1.000]", None], "finding": ["1.0 [0, 1]", "it is 1.0 [0, 1]"]})
    page = HtmlTable(frame)._repr_html_()
    assert '<td class="number">0.994 [0.963, 1.000]</td>' in page
    assert '<td class="number">1.0 [0, 1]</td>' in page
    marked = HtmlTable(pl.DataFrame({"auc": ["0.386 [0.192, 0.555] ☆", "reference"], "seeds": ["one", "two"]}))
    assert marked._repr_html_().count('<td class="number">') == 1


def test_an_error_while_something_is_only_shown_stands_in_its_place(capsys):
    with only_shows():
        raise duckdb.OutOfMemoryException("Out of Memory Error: failed to allocate <1 GB>")
    shown = capsys.readouterr().out
    assert "OutOfMemoryException" in shown
    assert "does not depend on it" in shown
    with pytest.raises(KeyboardInterrupt), only_shows():
        raise KeyboardInterrupt


def test_long_empty_and_stacked_tables_say_so() -> None:
    table = HtmlTable(pl.DataFrame({"n": range(250)}))
    assert "and 50 more rows" in table._repr_html_()
    assert repr(table).endswith("and 50 more rows")
    empty = HtmlTable(pl.DataFrame(schema={"reason": pl.String}))
    assert rows_of(empty) == [["Reason"]]
    assert repr(empty).splitlines() == ["Reason", "none"]
    stacked = HtmlTable(pl.DataFrame({"score": [0.5], "reasons": [None]}), missing="", stacks=True)._repr_html_()
    assert '<td title="Score" class="number">0.500</td>' in stacked
    assert re.search(r'<td title="Reasons"[^>]*></td>', stacked), (
        "and an empty one is empty, so that it can be left out"
    )
