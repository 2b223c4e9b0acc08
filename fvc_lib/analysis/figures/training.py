"""Learning curves of a run, while and after it trains."""

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from fvc_lib.analysis.dashboard.panels import METRICS, MOST_METRICS, NOTHING, PANELS, Selection, Shown
from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.theme import of_fold
from fvc_lib.analysis.read.queries import learning_curves
from fvc_lib.analysis.wording import count_text, figure_text, metric_name, number_text
from fvc_lib.metrics.declaration import is_share
from fvc_lib.services.tasks import TASK_OF_STAGE

_PANELS_PER_ROW = 3
_SMALL = 7  # up to here a curve shows its points too


def learning_curves_figure(curves: pl.DataFrame, metric: str = "loss", *, smoothing: float = 0.0) -> go.Figure:
    """One small panel per fold (and run) of ``queries.learning_curves``, all on one scale: train and validation.

    ``smoothing`` 0 draws what was logged; towards 1 an exponential mean over ever more points, over a pale original.
    """
    rows = curves.filter((pl.col("metric") == metric) & pl.col("value").is_not_null())
    if rows.is_empty():
        return theme.nothing_to_show(f"Learning curves of {metric_name(metric)}", "No value of it has been logged yet.")
    name = _curve_name(rows, metric)
    panels = rows.select("run_id", "stage", "fold").unique(maintain_order=True)
    columns = min(_PANELS_PER_ROW, panels.height)
    num_rows = -(-panels.height // columns)
    height = 170 + 190 * num_rows
    figure = make_subplots(
        rows=num_rows, cols=columns, shared_yaxes=True, shared_xaxes=False, horizontal_spacing=0.03,
        vertical_spacing=62 / height if num_rows > 1 else 0,
        subplot_titles=[figure_text(_series_name(panel, panels)) for panel in panels.iter_rows(named=True)],
    )  # fmt: skip
    finding, subtitle = _training_finding(rows, name)
    figure.update_layout(theme.figure(finding, subtitle, height=height).layout)
    for position, series in enumerate(panels.iter_rows()):
        keys = zip(("run_id", "stage", "fold"), series, strict=True)
        inside = rows.filter(*(pl.col(name).eq_missing(pl.lit(value)) for name, value in keys))
        where = {"row": position // columns + 1, "col": position % columns + 1}
        for phase in inside["phase"].unique(maintain_order=True):
            points = inside.filter(pl.col("phase") == phase).sort("step")
            _add_curve(figure, points, phase, smoothing, first=position == 0, where=where)
    figure.update_annotations(font={"size": 12, "color": theme.NEUTRAL})
    figure.update_xaxes(title_text="Step", row=num_rows)
    figure.update_yaxes(title_text=figure_text(name), col=1)
    if is_share(metric):  # a curve that never moves would get an axis from below nothing to above everything
        figure.update_yaxes(range=[-0.03, 1.03])
    # Beside the subtitle: the panels' own titles take the place above them.
    beside = {"y": 1 - 42 / height, "yref": "container", "yanchor": "top"}
    figure.update_layout(legend={"orientation": "h", "x": 1, "xanchor": "right", **beside})
    return figure


def smoothed(values: pl.Series, smoothing: float) -> pl.Series:
    """Exponential mean with weight 1 - ``smoothing`` on the newest; ``ValueError`` where that is outside [0, 1)."""
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing: got {smoothing}, wanted a number in [0, 1).")
    return values.cast(pl.Float64).ewm_mean(alpha=1 - smoothing, adjust=True)


def _series_name(row: dict[str, object], among: pl.DataFrame) -> str:
    """Of run, stage and fold what tells this series from the others."""
    parts = [str(row["run_id"])] if among["run_id"].n_unique() > 1 else []
    if row["fold"] is None or among["stage"].n_unique() > 1:
        parts.append(str(row["stage"]))
    if row["fold"] is not None:
        parts.append(f"fold {row['fold']}")
    return ", ".join(parts)


def _curve_name(rows: pl.DataFrame, metric: str) -> str:
    """Return the metric's name; a sum of several kinds of loss has no unit."""
    sums = set(TASK_OF_STAGE) & set(rows["stage"])
    return "Loss" if metric == "loss" and sums else metric_name(metric)


def _training_finding(rows: pl.DataFrame, name: str) -> tuple[str, str]:
    last = rows.sort("step").group_by("run_id", "stage", "fold", "phase", maintain_order=True).last()
    by_phase = last.group_by("phase", maintain_order=True).agg(pl.col("value").mean())
    last_values = ", ".join(f"{number_text(value)} in {phase}" for phase, value in by_phase.iter_rows())
    panels = rows.select("run_id", "stage", "fold").n_unique()
    counted = f"n = {count_text(rows.height, 'logged value')} in {count_text(panels, 'panel')}"
    subtitle = f"{counted}; the title has the mean of each curve's last value"
    return f"{name} ends at {last_values}", subtitle


def _add_curve(
    figure: go.Figure, points: pl.DataFrame, phase: str, smoothing: float, *, first: bool, where: dict[str, int]
) -> None:
    color = {"train": theme.CONTROL, "validation": theme.MODEL}.get(phase, theme.SERIES[1])
    dash = "solid" if phase in ("train", "validation") else "dot"
    steps, values, fold = points["step"].to_numpy(), points["value"], of_fold(points["fold"][0])
    if smoothing > 0:
        pale = {"color": theme.translucent(color, 0.3), "width": 1}
        figure.add_trace(
            go.Scatter(
                x=steps, y=values.to_numpy(), mode="lines", line=pale, showlegend=False, hoverinfo="skip", meta=fold
            ),
            **where,
        )
    figure.add_trace(
        go.Scatter(
            x=steps, y=smoothed(values, smoothing).to_numpy(), name=figure_text(phase), legendgroup=figure_text(phase),
            showlegend=first, mode=_mode(points),
            line={"color": color, "width": 2, "dash": dash}, marker={"size": 5},
            customdata=points["epoch"].to_list(), meta=fold,
            hovertemplate="step %{x}, epoch %{customdata}<br>%{y:.4f}",
        ),
        **where,
    )  # fmt: skip


def _mode(points: pl.DataFrame) -> str:
    return "lines+markers" if points.height <= _SMALL else "lines"


# --- Panels of the dashboard


def _declare_curves(number: int) -> None:
    @PANELS.register_panel(
        f"learning curves {number + 1}",
        at=30 + number,
        follows=("metrics", "folds", "smoothing", "highlight"),
        reads=METRICS,
    )
    def draw(selection: Selection) -> Shown:
        if number >= len(selection.metrics):
            return NOTHING
        metric = selection.metrics[number]
        curves = learning_curves([selection.detailed], metrics=[metric], folds=selection.folds).frame
        return learning_curves_figure(curves, metric, smoothing=selection.smoothing)


for _number in range(MOST_METRICS):
    _declare_curves(_number)
