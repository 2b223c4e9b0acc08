import plotly.graph_objects as go
import polars as pl
import pytest

from fvc_lib.analysis.figures.corpus import (
    group_links_figure,
    group_lookup_figure,
    group_sizes_figure,
    label_kinds_figure,
)
from fvc_lib.services.tables import ANNOTATIONS, GROUP_LINKS

HOSTILE = "<a href='http://x'>b</a>"


def annotations(*rows: tuple[str, str | None, str | None]) -> pl.DataFrame:
    """Rows of (source id, label, platform)."""
    return pl.DataFrame(
        [(source, "t.csv", place + 1, label, None, f"group {source}", platform, place == 0)
         for place, (source, label, platform) in enumerate(rows)],
        schema=list(ANNOTATIONS.columns), orient="row",
    )  # fmt: skip


def links(*why: str) -> pl.DataFrame:
    return pl.DataFrame(
        [(f"g{place // 2}", reason, "e", "a", "b") for place, reason in enumerate(why)],
        schema=list(GROUP_LINKS.columns), orient="row",
    )  # fmt: skip


def title(figure: go.Figure) -> str:
    return str(figure.layout.title.text).replace("<br>", " ")


def test_every_row_is_in_the_figure_of_labels_also_rare_ones() -> None:
    rows = [("s0", "fake", "youtube"), ("s1", "real", None), ("s2", None, "youtube"), ("s3", "parody", "facebook")]
    rows += [(f"t{n}", f"kind {n}", f"platform {n}") for n in range(20)]
    figure = label_kinds_figure(annotations(*rows))
    assert sum(sum(trace.x) for trace in figure.data) == len(rows)
    assert title(figure).startswith("1 row labelled fake and 1 labelled real; 22 neither")
    assert "1 of the sources has a file here" in figure.layout.title.subtitle.text
    assert len(figure.data) <= 9


def test_groups_are_counted_by_size_and_by_the_labels_they_hold() -> None:
    sizes = {"a": ["real"], "b": ["fake"] * 3, "c": ["fake", "real"], "d": ["fake"] * 4, "e": ["parody"]}
    members = pl.DataFrame(
        [(group, label) for group, labels in sizes.items() for label in labels],
        schema=["group_id", "label"], orient="row",
    )  # fmt: skip
    figure = group_sizes_figure(members)
    bars = {trace.name: dict(zip(trace.x, trace.y, strict=True)) for trace in figure.data}
    assert bars == {
        "real only": {"1": 1, "2 to 3": 0, "4 to 7": 0},
        "fake only": {"1": 0, "2 to 3": 1, "4 to 7": 1},
        "real and fake": {"1": 0, "2 to 3": 1, "4 to 7": 0},
        "neither": {"1": 1, "2 to 3": 0, "4 to 7": 0},
    }
    assert "2 largest of 5 groups" in title(figure)
    assert figure.layout.xaxis.title.text == "Videos in the group"


@pytest.mark.parametrize(
    "figure",
    [
        label_kinds_figure(annotations()),
        group_sizes_figure(pl.DataFrame(schema={"group_id": pl.String, "label": pl.String})),
        group_links_figure(links()),
        group_lookup_figure(pl.DataFrame([])),
    ],
)
def test_nothing_to_show_is_said_in_words(figure: go.Figure) -> None:
    assert "nothing to show" in title(figure)


def test_names_from_outside_are_text() -> None:
    for figure in (
        label_kinds_figure(annotations(("s", HOSTILE, HOSTILE), ("t", "fake", "web"))),
        group_links_figure(links(HOSTILE)),
    ):
        assert "<a " not in figure.to_json().replace("\\u003c", "<").replace('\\"', '"')
