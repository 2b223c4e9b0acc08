import json
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
import pytest

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.corpus import (
    fold_balance_figure,
    group_links_figure,
    group_lookup_figure,
    group_sizes_figure,
    index_overview_figure,
    label_kinds_figure,
)
from fvc_lib.analysis.figures.memory import growth_figure, phase_peaks_figure, stage_timeline_figure
from fvc_lib.analysis.figures.results import (
    audit_figure,
    controls_figure,
    score_distribution_figure,
    slices_figure,
)
from fvc_lib.analysis.figures.roc_and_calibration import calibration_figure, pr_figure, risk_coverage_figure, roc_figure
from fvc_lib.analysis.figures.training import (
    learning_curves_figure,
    smoothed,
)
from fvc_lib.analysis.memory import run_memory
from fvc_lib.analysis.read import queries
from fvc_lib.analysis.read.records import read_tables
from fvc_lib.services import tables
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import RESULTS
from tests.analysis.memory_story import StoryWriter


def title(figure: go.Figure) -> str:
    return str(figure.layout.title.text).replace("<br>", " ")


def subtitle(figure: go.Figure) -> str:
    return str(figure.layout.title.subtitle.text).replace("<br>", " ")


# What has no unit, and so says none: everything else names its unit in parentheses.
UNIT_FREE = frozenset(
    {
        "ROC AUC", "Metric", "Scored by", "Slice", "Stage", "Stage and phase", "Run", "Outer fold", "Codec", "Step",
        "Epoch", "Videos", "Videos in the group", "Groups", "Links", "What joined them", "Rows of the label tables",
        "Platform", "Folds dealt",
    }
)  # fmt: skip


def all_figures(run: RunPaths) -> list[go.Figure]:
    """Every figure of the notebooks, but that of a preflight, which this run has not: test_memory_figures has it."""
    predictions = queries.predictions([run]).frame
    results = queries.results([run]).frame
    memory = run_memory(run)
    return [
        controls_figure(results),
        roc_figure(predictions, replicates=50),
        pr_figure(predictions, replicates=50),
        calibration_figure(predictions, replicates=50),
        risk_coverage_figure(predictions, replicates=50),
        score_distribution_figure(predictions),
        slices_figure(read_tables([("", run.slices)], tables.SLICES).frame),
        audit_figure(results),
        learning_curves_figure(queries.learning_curves([run]).frame),
        index_overview_figure(queries.index_counts(run, "codec").frame, "codec"),
        fold_balance_figure(queries.fold_balance(run).frame),
        phase_peaks_figure(memory),
        stage_timeline_figure(memory),
        growth_figure(memory),
    ]


def figures_of_annotations(index: pl.DataFrame) -> list[go.Figure]:
    """Those of notebook 01 that a corpus with label tables has."""
    rows = index.select(
        "source_id", pl.lit("a.csv").alias("origin"), pl.int_range(1, pl.len() + 1).alias("row"), "label",
        "stated_group", "group_id", "platform", pl.lit(value=True).alias("is_present"),
    )  # fmt: skip
    link = {"group_id": "g", "why": "near_duplicate", "evidence": "a, b", "first": "a", "second": "b"}
    scores = {
        "split": ["by row", "by group"], "value": [0.99, 0.5], "low": [0.98, 0.5], "high": [1.0, 0.5],
        "num_rows": [96, 96], "num_groups": [24, 24],
    }  # fmt: skip
    return [
        label_kinds_figure(rows),
        group_sizes_figure(rows),
        group_links_figure(pl.DataFrame([link])),
        group_lookup_figure(pl.DataFrame(scores)),
    ]


def test_every_figure_has_a_finding_an_n_and_units_in_the_one_look(run: RunPaths) -> None:
    annotated = figures_of_annotations(tables.read_table(run.index, tables.INDEX))
    for figure in (*all_figures(run), *annotated):
        assert len(title(figure)) > 20
        assert "n = " in subtitle(figure), subtitle(figure)
        for direction in ("x", "y"):
            named = [axis.title.text for axis in axes(figure, direction)]
            assert any(named), f"{title(figure)}: no {direction} axis has a title"
            for text in filter(None, named):
                assert "(" in text or text in UNIT_FREE, f"{title(figure)}: {text}"
        assert figure.layout.template.layout.font.family == theme.FONT
        assert figure.layout.paper_bgcolor is None  # the template's, which is white
        json.loads(figure.to_json())


def axes(figure: go.Figure, direction: str) -> list[Any]:
    """The axes of one direction that are shown."""
    names = [name for name in figure.layout if name.startswith(f"{direction}axis")]
    return [figure.layout[name] for name in names if figure.layout[name].visible is not False]


def test_every_figure_of_an_empty_run_says_why_it_is_empty(tmp_path_factory: pytest.TempPathFactory) -> None:
    for figure in all_figures(RunPaths(tmp_path_factory.mktemp("runs") / "e" / "run_x")):
        assert "nothing to show" in title(figure)
        assert subtitle(figure)
        assert not figure.data


def test_the_controls_figure_shows_each_score_with_its_interval(run: RunPaths) -> None:
    results = tables.read_table(run.results, RESULTS)
    figure = controls_figure(results)
    model = results.filter((pl.col("source") == "model") & (pl.col("scope") == "all") & (pl.col("metric") == "roc_auc"))
    point = figure.data[0]
    row = model.row(0, named=True)
    assert point.x[0] == row["value"]
    assert point.x[0] + point.error_x.array[0] == pytest.approx(row["high"])
    assert point.x[0] - point.error_x.arrayminus[0] == pytest.approx(row["low"])
    assert point.y[0] == "Model"
    assert "above its best control" in title(figure)
    assert title(figure).startswith("The model is above its best control")


def test_missing_controls_and_intervals_are_said_not_drawn(run: RunPaths) -> None:
    results = tables.read_table(run.results, RESULTS).filter(pl.col("source") == "model")
    bare = results.with_columns(pl.lit(None, pl.Float64).alias("low"), pl.lit(None, pl.Float64).alias("high"))
    figure = controls_figure(bare)
    assert "Not shown to be above" in title(figure)
    assert figure.data[0].error_x.array[0] == 0


def test_the_roc_title_and_the_score_share_are_what_the_predictions_say(run: RunPaths) -> None:
    predictions = queries.predictions([run]).frame
    right = (predictions["score"] >= predictions["threshold"]) == (predictions["label"] == "fake")
    assert title(score_distribution_figure(predictions)).startswith(f"{right.mean():.0%} of the videos")
    value = queries.results([run]).frame.filter(source="model", scope="all", metric="roc_auc")["value"][0]
    assert f"AUC {value:.3f}" in title(roc_figure(predictions, replicates=2))


def test_one_video_and_one_class_do_not_break_a_figure(run: RunPaths) -> None:
    one = queries.predictions([run]).frame.head(1)
    assert "nothing to show" in title(roc_figure(one))
    score_distribution_figure(one)
    calibration_figure(one)
    learning_curves_figure(queries.learning_curves([run]).frame.filter(pl.col("metric") == "loss").head(1))


def test_memory_of_a_device_and_of_its_process_are_two_lines(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "e" / "run_x")
    writer = StoryWriter(run)
    for used in (2000, 6000, 4000):
        writer.sample(700).sample(used, seconds=0, device="cuda:0", rss_mb=600)
    figure = stage_timeline_figure(run_memory(run))
    lines = {trace.name: list(trace.y) for trace in figure.select_traces({"mode": "lines"})}
    assert lines == {"cuda:0": [2000, 6000, 4000], "process with children": [700, 700, 700]}
    assert title(figure).startswith("Memory of cuda:0 peaks at 6.00 GB of 2.00 GB allowed")
    assert stage_timeline_figure(run_memory(run, folds=[1])).layout.title.text == "Memory over time: nothing to show"
    assert queries.memory_peaks([run]).frame["peak_rss_bytes"].item() == 700_000_000


def test_smoothing_is_a_weighted_mean_of_what_came_before() -> None:
    values = pl.Series([1.0, 5.0, 2.0])
    weights = [np.array([0.6**k for k in range(n, -1, -1)]) for n in range(3)]
    wanted = [float(w @ values[: n + 1].to_numpy() / w.sum()) for n, w in enumerate(weights)]
    np.testing.assert_allclose(smoothed(values, 0.6), wanted)
    assert smoothed(values, 0).to_list() == values.to_list()
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        smoothed(values, 1.0)


def test_rare_values_are_gathered_and_none_is_lost() -> None:
    rows = [
        {"label": label, "value": f"v{n:02d}", "num_videos": 40 - n} for n in range(30) for label in ("real", "fake")
    ]
    figure = index_overview_figure(pl.DataFrame(rows), "codec")
    assert sum(sum(trace.x) for trace in figure.data) == sum(row["num_videos"] for row in rows)
    assert figure.layout.yaxis.categoryarray[0] == "other"
    assert len(figure.layout.yaxis.categoryarray) == 15


def test_names_are_text_in_titles_ticks_and_legends() -> None:
    hostile = "<a href='http://x'>b</a>"
    counts = pl.DataFrame({"label": ["real"], "value": [hostile], "num_videos": [3]})
    curves = pl.DataFrame(
        {"run_id": [hostile, "b"], "stage": ["s"] * 2, "fold": [None] * 2, "phase": [hostile] * 2,
         "metric": [hostile] * 2, "step": [1, 1], "epoch": [0, 0], "value": [0.1, 0.2]},
        schema_overrides={"fold": pl.Int64},
    )  # fmt: skip
    for figure in (
        index_overview_figure(counts, hostile),
        learning_curves_figure(curves, hostile),
    ):
        assert "<a " not in figure.to_json().replace("\\u003c", "<").replace('\\"', '"')
