"""Verdicts on files: their scores next to those of videos with known labels.

``table`` holds rows of VERDICTS (``services.tables``).
"""

from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.wording import count_text, figure_text, interval_text

_MOST_VIDEOS = 40
_SYMBOLS = {"fake": "diamond", "real": "circle", "undecided": "circle-open"}
_COLORS = {**theme.LABEL_COLORS, "undecided": theme.MODEL}


def ruler_figure(table: pl.DataFrame, tested: pl.DataFrame) -> go.Figure:
    """Return a figure: scores of files with their range over networks, below the scores of the run's reals and fakes.

    ``tested`` holds ``label score`` of the run's videos; a score is by a network that was not trained on the video.
    """
    scored = table.drop_nulls("score")
    shown = scored.head(_MOST_VIDEOS)
    if shown.is_empty():
        return theme.nothing_to_show("Scores", "No file has one.")
    decided = (shown["verdict"] != "undecided").sum()
    more = scored.height - shown.height
    drawn = theme.figure(
        f"Scores of {count_text(shown.height, 'video')}, {decided} of them decided, under those of the run's own",
        "Ticks: the run's videos, each scored by a network that had not seen it; bars: range over the folds' networks; "
        "hollow: undecided" + (f"; {more:,} more are in verdicts.csv" if more else ""),
        height=210 + 26 * shown.height,
    )
    for label, color in theme.LABEL_COLORS.items():
        scores = tested.filter(label=label)["score"].to_list()
        line = {"width": 1.5, "color": theme.translucent(color, 0.6)}
        look = {"mode": "markers", "marker": {"symbol": "line-ns", "size": 14, "line": line}}
        theme.add_line(drawn, scores, [f"known {label}s"] * len(scores), label, color, **look)
    ends = [pl.col(name).fill_null(pl.col("score")) for name in ("score_low", "score_high")]
    for number, (path, verdict, score, low, high) in enumerate(
        shown.select("path", "verdict", "score", *ends).iter_rows(), start=1
    ):
        color, tick = _COLORS[verdict], figure_text(f"{number} {theme.shortened(Path(path).name, 22)}")
        bar: dict[str, Any] = {
            "mode": "markers",
            "cliponaxis": False,
            "error_x": theme.error_bar([score], [low], [high], color),
        }
        mark = {"symbol": _SYMBOLS[verdict], "size": 11, "color": color}
        theme.add_line(drawn, [score], [tick], verdict, color, marker=mark, **bar)
    drawn.update_yaxes(autorange="reversed", showgrid=False, type="category")
    drawn.update_xaxes(title_text="score (0 real, 1 fake)", range=[-0.03, 1.03])
    return drawn.update_layout(showlegend=False)


def verdict_table(table: pl.DataFrame) -> pl.DataFrame:
    """Return one row per file: ``file verdict score reasons``, and ``probability`` before ``reasons`` if any is known.

    ``score`` is text with the range over networks.
    """
    scores = [
        "" if score is None else interval_text(score, low, high)
        for score, low, high in table.select("score", "score_low", "score_high").iter_rows()
    ]
    unread = pl.when(pl.col("failure").is_null()).then(pl.lit("no prediction")).otherwise(pl.lit("not read"))
    has_probability = table["probability"].null_count() < table.height
    return table.select(
        pl.col("path").str.split("/").list.last().alias("file"),
        pl.coalesce("verdict", unread).alias("verdict"),
        pl.Series("score", scores, dtype=pl.String),
        *["probability"] * has_probability,
        pl.col("reasons").str.replace_all("\n", " "),
    )
