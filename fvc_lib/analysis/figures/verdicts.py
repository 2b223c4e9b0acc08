"""Verdicts on files: scores against those of known reals and fakes, and the frames that the networks saw.

``table`` is VERDICTS; ``tested`` has ``label score`` of the run's videos, each by a network that had not seen it.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.gallery import Card, Gallery, strip
from fvc_lib.analysis.wording import count_text, figure_text, interval_text, number_text
from fvc_lib.services.atomic_files import path_to_text

_MOST_VIDEOS = 40
_NAME = 22  # characters
_SYMBOLS = {"fake": "diamond", "real": "circle", "undecided": "circle-open"}
_COLORS = {**theme.LABEL_COLORS, "undecided": theme.MODEL}


class Strips:
    """Keeps a strip of the frames of the first files that it is given."""

    def __init__(self, most: int = _MOST_VIDEOS) -> None:
        self._most, self.by_path = most, dict[str, bytes]()

    def __call__(self, path: Path, frames: npt.NDArray[np.uint8]) -> None:
        """Keep a strip of ``frames``, uint8 (T, 3, H, W)."""
        if len(self.by_path) < self._most:
            self.by_path[path_to_text(path)] = strip(frames)

    def gallery(self, table: pl.DataFrame) -> Gallery:
        """Each file that there are frames of, with its verdict and the first reason."""
        cards = []
        for row in table.filter(pl.col("path").is_in(list(self.by_path))).iter_rows(named=True):
            name = Path(row["path"]).name
            lines = (f"score {number_text(row['score'])}, {range_text(row)}", *row["reasons"].splitlines())
            cards.append(Card(self.by_path[row["path"]], f"frames of {name}", f"{row['verdict']}: {name}", lines))
        told = (
            "What the networks saw, from first to last; not of videos of the run, of copies, and of files that an "
            "earlier call had judged."
        )
        return Gallery(tuple(cards), told if cards else "No new file was shown to a network.")


def range_text(row: dict[str, object]) -> str:
    """Return the range over the folds' networks."""
    low, high = row["score_low"], row["score_high"]
    if not isinstance(low, float) or not isinstance(high, float):
        return "one network"
    return f"networks from {number_text(low)} to {number_text(high)}"


def ruler_figure(table: pl.DataFrame, tested: pl.DataFrame) -> go.Figure:
    """Scores, with their range over networks, under the run's out-of-fold reals and fakes."""
    shown = table.drop_nulls("score").head(_MOST_VIDEOS)
    if not shown.height:
        return theme.nothing_to_show("Scores", "No file has one.")
    more = table.drop_nulls("score").height - shown.height
    decided = shown.filter(pl.col("verdict") != "undecided").height
    drawn = theme.figure(
        f"Scores of {count_text(shown.height, 'video')}, {decided} of them decided, under those of the run's own",
        "Ticks: the run's videos, each scored by a network that had not seen it; bars: range over the folds' networks; "
        "hollow: undecided" + (f"; {more:,} more are in verdicts.csv" if more else ""),
        height=210 + 26 * shown.height,
    )
    for label, plain in theme.LABEL_COLORS.items():
        color = theme.translucent(plain, 0.6)
        scores = tested.filter(label=label)["score"].to_numpy()
        drawn.add_trace(
            go.Scatter(
                x=scores, y=[f"known {label}s"] * len(scores), mode="markers", name=label, hoverinfo="x",
                marker={"symbol": "line-ns", "size": 14, "line": {"width": 1.5, "color": color}},
            )
        )  # fmt: skip
    ticks: list[str] = []
    for number, row in enumerate(shown.iter_rows(named=True), start=1):
        low, high = (row[name] if row[name] is not None else row["score"] for name in ("score_low", "score_high"))
        ticks.append(figure_text(f"{number} {_short_name(Path(row['path']).name)}"))
        color = _COLORS[row["verdict"]]
        drawn.add_trace(
            go.Scatter(
                x=[row["score"]], y=[ticks[-1]], mode="markers", name=row["verdict"], cliponaxis=False,
                marker={"symbol": _SYMBOLS[row["verdict"]], "size": 11, "color": color},
                error_x={"type": "data", "symmetric": False, "array": [high - row["score"]],
                         "arrayminus": [row["score"] - low], "color": color, "thickness": 1.5, "width": 4},
            )
        )  # fmt: skip
    drawn.update_yaxes(autorange="reversed", showgrid=False, type="category")
    drawn.update_xaxes(title_text="score (0 real, 1 fake)", range=[-0.03, 1.03])
    drawn.update_layout(showlegend=False)
    return drawn


def _short_name(name: str) -> str:
    """With its middle left out where it is long: files of one source begin alike."""
    return name if len(name) <= _NAME else f"{name[: _NAME // 2 - 2]}…{name[-(_NAME // 2 + 1) :]}"


def verdict_table(table: pl.DataFrame) -> pl.DataFrame:
    """As a page shows it: files by name, the score with its range, reasons as one text."""
    rows = table.iter_rows(named=True)
    shown = [interval_text(row["score"], row["score_low"], row["score_high"]) for row in rows]
    unsaid = pl.when(pl.col("failure").is_null()).then(pl.lit("no prediction")).otherwise(pl.lit("not read"))
    return table.select(
        file=pl.col("path").str.split("/").list.last(),
        verdict=pl.coalesce("verdict", unsaid),
        score=pl.Series(["" if text == "not recorded" else text for text in shown], dtype=pl.String),
        **({"probability": pl.col("probability")} if table["probability"].null_count() < table.height else {}),
        reasons=pl.col("reasons").str.replace_all("\n", " "),
    )
