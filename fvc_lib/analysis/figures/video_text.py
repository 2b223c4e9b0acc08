"""Figures of videos and the texts that describe them: at which place a query finds what belongs to it.

``ranks`` are rows of ``tables.RETRIEVAL_RANKS``, ``pairs`` of ``tables.VIDEO_TEXTS``.
"""

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.dashboard.panels import NOTHING, PANELS, Selection, Shown, confidence_of, table_of
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.corpus import LEGEND
from fvc_lib.analysis.figures.tasks import beside_controls_figure, metric_and_control_table
from fvc_lib.analysis.pages.display import HtmlTable
from fvc_lib.analysis.wording import count_text, figure_text, metric_name

DIRECTIONS = ("video_to_text", "text_to_video")
_COLORS = {"video_to_text": theme.SERIES[0], "text_to_video": theme.SERIES[1]}
_MOST_POINTS = 400  # of a curve: places beyond are taken at even distances of their logarithm
_MOST_BARS = 20


def found_within_figure(ranks: pl.DataFrame) -> go.Figure:
    """Return the share of queries with a match among the first k candidates, in both directions.

    Beside each, what a random order finds: of P positives among N candidates one is within the first k with probability
    1 - C(N - P, k) / C(N, k), the mean over the queries.
    """
    if ranks.is_empty():
        return theme.nothing_to_show("Retrieval", "No query of the test part is recorded.")
    figure = theme.figure(_finding(ranks), _subtitle(ranks), height=420)
    for direction in DIRECTIONS:
        rows = ranks.filter(pl.col("direction") == direction)
        if rows.is_empty():
            continue
        name = direction.replace("_", " ")
        places = _places(int(rows["num_candidates"].max()))  # type: ignore[arg-type]  # polars' max is wide
        found = np.searchsorted(np.sort(rows["rank"].to_numpy()), places, side="right") / rows.height
        figure.add_trace(_curve(places, found, name, _COLORS[direction], "solid"))
        figure.add_trace(_curve(places, chance_within(rows, places), f"{name}, chance", _COLORS[direction], "dot"))
    figure.update_xaxes(title_text="Candidates looked at, best first (logarithmic)", type="log")
    figure.update_yaxes(title_text="Queries that found theirs", tickformat=".0%", range=[-0.02, 1.04])
    figure.update_layout(legend=LEGEND)
    return figure


def chance_within(ranks: pl.DataFrame, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """(K,), the share of queries, of one direction, that a random order satisfies within ``places`` (K,) from 1."""
    kinds = ranks.group_by("num_candidates", "num_positives").len()
    total = np.zeros(places.size)
    for candidates, positives, count in kinds.iter_rows():
        # The product over the positives of the share that is missed, given that all before it were.
        missed = np.ones(places.size)
        for number in range(positives):
            missed *= np.clip(candidates - number - places, 0, None) / (candidates - number)
        total += count * (1 - missed)
    return total / max(ranks.height, 1)


def text_use_figure(pairs: pl.DataFrame) -> go.Figure:
    """How many videos a text stands beside: repeated texts are one text with many videos."""
    if pairs.is_empty():
        return theme.nothing_to_show("Texts", "The index has no pair of a video and a text.")
    uses = pairs.group_by("text_id").agg(num_videos=pl.col("video_id").n_unique())
    counts = uses.with_columns(shown=pl.col("num_videos").clip(upper_bound=_MOST_BARS)).group_by("shown").len()
    repeated = int((uses["num_videos"] > 1).sum())
    num_videos = pairs["video_id"].n_unique()
    figure = theme.figure(
        f"{repeated:,} of {count_text(uses.height, 'text')} stand beside more than one video",
        f"n = {count_text(pairs.height, 'pair')} of {count_text(num_videos, 'video')} in "
        f"{count_text(pairs['group_id'].n_unique(), 'group')}; equal texts count as one",
        height=300,
    )
    found = dict(counts.iter_rows())
    sizes = range(1, max(found) + 1)
    ticks = [f"{size}{' or more' if size == _MOST_BARS else ''}" for size in sizes]
    figure.add_trace(
        go.Bar(
            x=ticks, y=[found.get(size, 0) for size in sizes], marker={"color": theme.REAL}, showlegend=False,
            hovertemplate="%{y} texts beside %{x} videos<extra></extra>",
        )
    )  # fmt: skip
    figure.update_layout(bargap=0.5)
    figure.update_xaxes(title_text="Videos that a text stands beside", type="category", showgrid=False)
    figure.update_yaxes(title_text="Texts", rangemode="tozero")
    return figure


def parts_table(curves: pl.DataFrame, epoch: int) -> pl.DataFrame:
    """``metric train validation``: what was measured of both parts after ``epoch``, of ``queries.learning_curves``."""
    both = ("train", "validation")
    rows = curves.filter(pl.col("epoch") == epoch, pl.col("phase").is_in(both), pl.col("metric") != "loss")
    values = {(phase, metric): value for phase, metric, value in rows.select("phase", "metric", "value").iter_rows()}
    measured = sorted(metric for phase, metric in values if phase == "train" and ("validation", metric) in values)
    columns = {phase: pl.Series([values[phase, metric] for metric in measured], dtype=pl.Float64) for phase in both}
    return pl.DataFrame({"metric": pl.Series([metric_name(name) for name in measured], dtype=pl.String)} | columns)


def _places(most: int) -> npt.NDArray[np.int64]:
    if most <= _MOST_POINTS:
        return np.arange(1, most + 1)
    return np.unique(np.geomspace(1, most, _MOST_POINTS).round().astype(np.int64))


def _curve(
    places: npt.NDArray[np.int64], shares: npt.NDArray[np.float64], name: str, color: str, dash: str
) -> go.Scatter:
    is_short = places.size <= 8 and dash == "solid"
    return go.Scatter(
        x=places, y=shares.round(5), mode="lines+markers" if is_short else "lines", name=figure_text(name),
        line={"color": color, "dash": dash, "width": 2.2 if dash == "solid" else 1.4, "shape": "hv"},
        hovertemplate="%{y:.1%} within the first %{x}<extra>" + figure_text(name) + "</extra>",
    )  # fmt: skip


def _finding(ranks: pl.DataFrame) -> str:
    parts = []
    for direction in DIRECTIONS:
        rows = ranks.filter(pl.col("direction") == direction)
        if rows.height:
            words = direction.replace("_", " ")
            parts.append(f"{float((rows['rank'] == 1).mean() or 0):.0%} from {words}")  # type: ignore[arg-type]
    return f"At the first place stands what belongs there for {' and '.join(parts)}"


def _subtitle(ranks: pl.DataFrame) -> str:
    parts = []
    for direction in DIRECTIONS:
        rows = ranks.filter(pl.col("direction") == direction)
        if rows.height:
            query, candidate = direction.split("_to_")
            among = f"among {count_text(int(rows['num_candidates'].max()), candidate)}"  # type: ignore[arg-type]
            parts.append(f"{count_text(rows.height, query)} {among}")
    groups = count_text(ranks["group_id"].n_unique(), "group")
    return f"n = {' and '.join(parts)} of the test part, {groups}; ties count against the model"


# --- Panels of the dashboard

_SHOWN_CAPTIONS = 12


@PANELS.register_panel("retrieval beside chance", at=23, tasks=("video_text",))
def _retrieval_panel(selection: Selection) -> Shown:
    found, confidence = table_of(selection, "task_results"), confidence_of(selection)
    metrics = found.filter(pl.col("metric").str.starts_with("recall@"))["metric"].unique(maintain_order=True)
    shown = [(direction, metric) for direction in DIRECTIONS for metric in metrics]
    return beside_controls_figure(found, shown, counted=("query", "queries"), confidence=confidence)


@PANELS.register_panel("ranks", at=55, tasks=("video_text",))
def _ranks_panel(selection: Selection) -> Shown:
    return found_within_figure(table_of(selection, "retrieval_ranks"))


@PANELS.register_panel("caption metrics", at=56, tasks=("video_text",))
def _caption_metrics_panel(selection: Selection) -> Shown:
    table = metric_and_control_table(table_of(selection, "task_results"), ["captions"])
    confidence = f"{confidence_of(selection):.0%} intervals over groups"
    return HtmlTable(table, caption=f"Captions of the test part, with {confidence}") if table.height else NOTHING


@PANELS.register_panel("captions", at=57, tasks=("video_text",))
def _captions_panel(selection: Selection) -> Shown:
    captions = table_of(selection, "captions")
    if captions.is_empty():
        return NOTHING
    repeats = pl.col("references").str.split("\n").list.contains(pl.col("caption"))
    # Half of them such as repeat no reference, if there are so many; the ids decide which.
    known = captions.with_columns(as_a_reference=repeats).sort("video_id")
    num_other = max(_SHOWN_CAPTIONS // 2, _SHOWN_CAPTIONS - int(known["as_a_reference"].sum()))
    other, same = known.filter(~pl.col("as_a_reference")).head(num_other), known.filter("as_a_reference")
    shown = pl.concat([other, same.head(_SHOWN_CAPTIONS - other.height)])
    right = count_text(int(known["as_a_reference"].sum()), "caption")
    caption = f"{right} of n = {known.height:,} repeat a reference word by word; {shown.height} of all"
    # The path last: on a phone it would leave the texts no room.
    columns = ("caption", pl.col("references").str.replace_all("\n", " / "), "as_a_reference", "path")
    return HtmlTable(shown.select(columns), caption=caption, names={"path": "Video", "as_a_reference": "Same"})
