import os

import pytest

from fvc_lib.analysis.wording import (
    bytes_text,
    clean_text,
    duration_text,
    figure_text,
    interval_text,
    number_text,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "not recorded"), (float("nan"), "not recorded"), (0.04, "0.0 s"), (9.96, "10.0 s"), (42.4, "42 s"),
     (59.4, "59 s"), (185, "3 min 05 s"), (3599.6, "1 h 00 min"), (8040, "2 h 14 min"), (-1, "not recorded")],
)  # fmt: skip
def test_durations(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(None, "not recorded"), (812_000_000, "812 MB"), (1_250_000_000, "1.25 GB"), (400, "0.4 kB"), (52_000, "52 kB")],
)
def test_bytes(size: float | None, text: str) -> None:
    assert bytes_text(size) == text


def test_a_missing_number_and_an_undefined_one_are_told_apart() -> None:
    assert number_text(None) == "not recorded"
    assert number_text(float("nan")) == "undefined"
    assert interval_text(0.81249, 0.7, 0.9) == "0.812 [0.700, 0.900]"
    assert interval_text(0.8, None, None) == "0.800"
    assert interval_text(0.8, float("nan"), float("nan")) == "0.800"
    assert interval_text(None, 0.1, 0.2) == "not recorded"


@pytest.mark.parametrize("raw", ["a\nb", "x\x1b[31m", os.fsdecode(b"\xff.mp4"), "right\u202eleft", "\x00"])
def test_text_stays_on_one_line_and_can_be_encoded(raw: str) -> None:
    text = clean_text(raw)
    text.encode()
    assert text.isprintable()


def test_figure_text_disarms_what_plotly_would_read_as_markup() -> None:
    assert figure_text('<a href="x">&lt;') == '&lt;a href="x"&gt;&amp;lt;'
