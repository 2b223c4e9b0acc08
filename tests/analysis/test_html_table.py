import os
import re
from html import unescape

import duckdb
import polars as pl
import pytest

from fvc_lib.analysis.pages.display import HtmlTable, only_shows
from fvc_lib.analysis.wording import (
    bytes_text,
    clean_text,
    duration_text,
    interval_text,
    number_text,
    with_commands,
)
from fvc_lib.services.config import meaning

HOSTILE = ["<script>alert(1)</script>", "a'b\"c", "&lt;", "]]>", "{{ 7*7 }}", "<!--", "&#0;", "&amp;lt;",
           "</td>", "<b", "\\u003c", "''", "é漢😀", "`${x}`", "javascript:alert(1)", "x"]  # fmt: skip


def rows_of(table: HtmlTable) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", table._repr_html_(), re.DOTALL)
    return [[unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)] for row in rows]


def test_any_text_is_shown_as_text() -> None:
    table = HtmlTable(pl.DataFrame({"<b>": HOSTILE}), caption="<i>caption")
    assert [row[0] for row in rows_of(table)[1:]] == HOSTILE
    tags = set(re.findall(r"<([a-z]+)", table._repr_html_()))
    assert tags == {"table", "caption", "thead", "tbody", "tr", "th", "td"}


def test_a_command_in_the_meaning_of_a_parameter_is_code_in_a_browser_and_plain_elsewhere() -> None:
    table = HtmlTable(pl.DataFrame({"value": "fvc doctor", "meaning": meaning("model")}))
    assert re.findall("<code>(.*?)</code>", table._repr_html_()) == ["fvc detectors"]
    assert "a name in the list of fvc detectors" in repr(table)


@pytest.mark.parametrize(
    ("sentence", "commands"),
    [
        ("Go on: fvc --resume '/a (b)/run;1, x.y'. It's <b>.", ["fvc --resume '/a (b)/run;1, x.y'"]),
        ("fvc status /runs/run.1 shows it. Then fvc clean, or -p workers 1.",
         ["fvc status /runs/run.1 shows it", "fvc clean", "-p workers 1"]),
    ],
)  # fmt: skip
def test_a_command_in_a_sentence_is_code_as_far_as_the_shell_reads_it(sentence, commands) -> None:
    page = with_commands(sentence)
    assert unescape(re.sub("</?code>", "", page)) == sentence
    assert list(map(unescape, re.findall("<code>(.*?)</code>", page))) == commands


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


@pytest.mark.fault(41)
def test_an_error_while_something_is_only_shown_stands_in_its_place(capsys):
    with only_shows():
        raise duckdb.OutOfMemoryException("Out of Memory Error: failed to allocate <1 GB>")
    assert re.search("OutOfMemoryException.*does not depend on it", capsys.readouterr().out)
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


@pytest.mark.parametrize(
    ("shown", "texts"),
    [
        (duration_text, {None: "not recorded", float("nan"): "not recorded", 0.04: "0.0 s", 9.96: "10.0 s",
                         42.4: "42 s", 59.4: "59 s", 185: "3 min 05 s", 3599.6: "1 h 00 min", 8040: "2 h 14 min",
                         -1: "not recorded"}),
        (bytes_text, {None: "not recorded", 812_000_000: "812 MB", 1_250_000_000: "1.25 GB", 400: "0.4 kB",
                      52_000: "52 kB"}),
        (number_text, {None: "not recorded", float("nan"): "undefined"}),
        (lambda values: interval_text(*values), {
            (0.81249, 0.7, 0.9): "0.812 [0.700, 0.900]", (0.8, None, None): "0.800",
            (0.8, float("nan"), float("nan")): "0.800", (None, 0.1, 0.2): "not recorded"}),
    ],
)  # fmt: skip
def test_durations_bytes_numbers_and_intervals_have_units_and_say_what_is_missing(shown, texts) -> None:
    assert {value: shown(value) for value in texts} == texts


@pytest.mark.parametrize("raw", ["a\nb", "x\x1b[31m", os.fsdecode(b"\xff.mp4"), "right\u202eleft", "\x00"])
def test_text_stays_on_one_line_and_can_be_encoded(raw: str) -> None:
    assert clean_text(raw).encode().decode().isprintable()
