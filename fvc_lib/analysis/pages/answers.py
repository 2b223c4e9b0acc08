"""Offline pages with a run's predictions for new files: one page per video, and one page that lists all files.

Drawings are SVG without scripts, because plotly's script has 4.8 MB and the page of a video is a single file.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from markupsafe import Markup

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.figures.gallery import thumbnail
from fvc_lib.analysis.pages.display import HtmlTable
from fvc_lib.analysis.pages.page import render, write_page
from fvc_lib.analysis.wording import interval_text
from fvc_lib.services.atomic_files import path_from_text

Floats = npt.NDArray[np.floating]
Pixels = npt.NDArray[np.uint8]

_MOST_TICKS = 300  # drawn scores of known videos of one label
_FRAMES, _FRAME_SIDE = 12, 160  # shown frames of a video, and pixels of their longer side
_UNDER_CURVE, _UNDER_SIDE = 8, 112  # frames below the curve, and pixels of their longer side
_HEATED = 4
_HEATED_SIDE = 168
_MOST_OPACITY = 0.72

# --- One judged video


@dataclass(frozen=True)
class Known:
    """Scores of the run's own videos, whose labels are known. No network scored a video that it was trained on.

    Attributes:
        reals: float64 (R,), scores of the R real videos.
        fakes: float64 (F,), scores of the F fake videos.
    """

    reals: Floats
    fakes: Floats


def write_video_page(path: Path, row: Mapping[str, Any], known: Known, *, stamp: str, **parts: Any) -> None:
    """Write the page of one video. The file is never left half written.

    Args:
        path: path of the page.
        row: the row of VERDICTS of the video, which must have a score.
        known: scores of videos with known labels, drawn next to that of the video.
        stamp: digest of the content. It is stored in the page, so that an unchanged page need not be made again.
        parts: further values for the template ``video.html``. ``frames`` comes from ``frame_pictures``. ``over_time``
            and ``heat_map`` come from the functions of these names. The others are ``evidence`` (``FileEvidence``:
            scores over time, heat map and provenance of the file), ``prior`` (assumed share of fakes, as text),
            ``standing`` (a warning that verdicts are withheld, or empty), ``limits`` (sentences on the limits of the
            model and its verdicts), and ``overview`` (address of the page of all verdicts).

    Raises:
        OSError: the page cannot be written.
    """
    ticks = {}
    for label, scores in (("fake", known.fakes), ("real", known.reals)):
        drawn = theme.thinned(len(scores), _MOST_TICKS)
        ticks[label] = np.sort(scores)[drawn].tolist()
    name = Path(row["path"]).name
    about = {"File": name, "SHA-256": row["sha256"], "Model": row["model_id"]}
    colors = {**theme.LABEL_COLORS, "undecided": theme.MODEL}
    body = render("video.html", name=name, row=row, known=known, about=about, ticks=ticks, colors=colors, **parts)
    write_page(path, f"{row['verdict']}: {name}", body, stamp=stamp)


def data_uri(frame: Pixels, side: int) -> str:
    """Return a frame, uint8 (3, H, W), as the data URI of a JPEG whose longer side has at most ``side`` pixels."""
    jpeg = thumbnail(frame.transpose(1, 2, 0), side)
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"


def frame_pictures(clips: Pixels) -> dict[str, Any]:
    """Return at most 12 evenly spread frames of N clips of T frames, for the template ``video.html``.

    ``clips`` are uint8 (N, T, 3, H, W). The keys of the dict are ``pictures`` (data URIs of the frames) and ``number``
    (N * T, the number of all frames).
    """
    frames = clips.reshape(-1, *clips.shape[2:])
    chosen = theme.thinned(len(frames), _FRAMES)
    pictures = [data_uri(frames[number], _FRAME_SIDE) for number in chosen]
    return {"pictures": pictures, "number": len(frames)}


def over_time(begins: Floats, ends: Floats, scores: Floats, middles: Pixels, seconds: float) -> Any:
    """Return the values for the template ``video.html`` to draw the score of a video over time.

    A window is a part of the video that the networks score. There are W windows and K networks.

    Args:
        begins: (W,), start of each window in seconds.
        ends: (W,), end of each window in seconds.
        scores: (W, K), the score of each window by each network, in [0, 1].
        middles: uint8 (W, 3, height, width), the middle frame of each window.
        seconds: length of the video in seconds.

    Returns:
        None with fewer than two windows, else a dict:

        - ``line`` and ``band``: the mean and the range over networks, as points of an SVG.
        - ``label``: description of the curve. ``ticks``: texts of the time axis.
        - ``several``: whether there are several networks.
        - ``under``: frames below the curve, as data URIs.
        - ``most``: the window with the highest mean, with ``begin`` and ``end`` in seconds, and ``score``.
    """
    if len(begins) < 2:
        return None
    middle = (begins + ends) / 2
    moments = (np.arange(_UNDER_CURVE) + 0.5) / _UNDER_CURVE * seconds
    nearest = np.abs(middle[:, None] - moments).argmin(0)
    means = scores.mean(1)
    highest = int(means.argmax())
    # Drawn 1000 wide and 100 high, with 1 at the top.
    instants = np.concatenate([[0.0], middle, [seconds]])
    x = 1000 * instants / seconds
    curves = (means, scores.min(1), scores.max(1))
    mean, low, high = (np.pad(100 * (1 - y), 1, "edge") for y in curves)
    outline = np.append(low, high[::-1])
    label = f"scores over {seconds:.1f} seconds, from {means.min():.2f} to {means.max():.2f}"
    pictures = [data_uri(middles[number], _UNDER_SIDE) for number in nearest]
    quarters = [f"{seconds * quarter / 4:.1f} s" for quarter in range(5)]
    most = {"begin": float(begins[highest]), "end": float(ends[highest]), "score": float(means[highest])}
    return {
        "line": _points(x, mean),
        "band": _points(np.append(x, x[::-1]), outline),
        "label": label,
        "several": scores.shape[1] > 1,
        "under": pictures,
        "ticks": quarters,
        "most": most,
    }


def _points(xs: Floats, ys: Floats) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))


def heat_map(clip: Pixels, values: Floats, top: float) -> dict[str, Any]:
    """Return the values for the template ``video.html`` to draw frames of a clip, without and with a heat map.

    The heat map shows which areas make the model call the video fake. Its values say how much the logit of fake
    decreases when the area is hidden. Consecutive frames often have the same map. At most four frames are drawn, and
    each has a different map.

    Args:
        clip: uint8 (T, 3, H, W).
        values: (T, H, W), the heat map of each frame, in [0, 1].
        top: the decrease of the logit where ``values`` is 1.

    Returns:
        A dict:

        - ``frames``: tuples ``(number, plain, marked)``: number of the frame in the clip, counted from 1, and its
          pictures without and with the heat map, as data URIs.
        - ``num_frames``: T.
        - ``top``: the argument ``top``.
        - ``color``: colour of a value of 1, as ``#RRGGBB``.
    """
    begins = np.flatnonzero((values[1:] != values[:-1]).any((1, 2))) + 1
    middles = (np.append(0, begins) + np.append(begins, len(values)) - 1) // 2
    frames = []
    for number in middles[theme.thinned(len(middles), _HEATED)].tolist():
        plain, marked = clip[number], heated(clip[number], values[number])
        frames.append((number + 1, data_uri(plain, _HEATED_SIDE), data_uri(marked, _HEATED_SIDE)))
    most = heated(np.full((3, 1, 1), 136, np.uint8), np.ones((1, 1)))
    return {"frames": frames, "num_frames": len(clip), "top": top, "color": f"#{most.tobytes().hex()}"}


def heated(frame: Pixels, values: Floats) -> Pixels:
    """Return a frame with a heat map over it: the frame in grey, under a colour whose opacity grows with ``values``.

    Args:
        frame: uint8 (3, H, W).
        values: (H, W), the heat map, in [0, 1].

    Returns:
        uint8 (3, H, W).
    """
    color = np.frombuffer(bytes.fromhex(theme.FAKE[1:]), np.uint8)[:, None, None]
    cover = _MOST_OPACITY * values[None]
    grey = frame.mean(0, keepdims=True)
    return np.asarray((grey * (1 - cover) + color * cover).round().clip(0, 255), np.uint8)


# --- All predictions for new files


def verdict_table(table: pl.DataFrame, pages: Mapping[str, str]) -> HtmlTable:
    """Return a table for readers with the verdicts on new video files, one row per file.

    The name of a file links to the page of that file.

    Args:
        table: rows of ``tables.VERDICTS``.
        pages: maps the path of a file to the address of its page.
    """
    ends = table.select("score", "score_low", "score_high").rows()
    scores = ["" if row[0] is None else interval_text(*row) for row in ends]
    unread = pl.when(pl.col("failure").is_null()).then(pl.lit("no prediction")).otherwise(pl.lit("not read"))
    file_name = pl.col("path").str.split("/").list.last()
    verdict = pl.coalesce("verdict", unread)
    shown = table.select(
        file_name.alias("file"),
        verdict.alias("verdict"),
        pl.Series("score", scores, dtype=pl.String),
        *(["probability"] if table["probability"].count() else []),
        pl.col("reasons").str.replace_all("\n", " "),
    )
    caption = "Scores are probabilities of fake, the mean over the networks; a name leads to the file's own page"
    links = {"file": [pages.get(path, "") for path in table["path"]]}
    return HtmlTable(shown, caption, links=links, max_rows=1000, missing="", stacks=True)


def prediction_table(table: pl.DataFrame) -> HtmlTable:
    """Return a table for readers with the predictions of an image or video-text model, one row per file.

    The name of a file links to the file itself. ``table`` holds the rows of ``predictions.csv``: the columns ``path``
    and ``remarks``, and the columns with the predictions.
    """
    file = pl.col("path").str.split("/").list.last().alias("file")
    shown = table.select(file, pl.exclude("path", "sha256", "part", "failure"))
    caption = "Answers, and remarks on files of the training; a name opens the file"
    links = {"file": [path_from_text(path).as_uri() for path in table["path"]]}
    return HtmlTable(shown, caption, links=links, max_rows=1000, missing="", stacks=True)


def write_predictions_page(
    path: Path, title: str, answer: str, worth: Sequence[str], table: HtmlTable, *, is_shown: bool
) -> None:
    """Write the page with a run's predictions for new files. It is never left half written.

    Args:
        path: path of the page.
        title: title of the page, plain text.
        answer: a sentence with the number of files.
        worth: sentences on how far the predictions can be trusted, such as those of ``headline.worth_of``.
        table: the table of the files.
        is_shown: whether the run is shown to be above its controls, the simple predictors that it must beat. If not,
            the page carries a warning.

    Raises:
        OSError: the page cannot be written.
    """
    files = Markup(table._repr_html_())
    body = render("predictions.html", title=title, answer=answer, worth=worth, is_shown=is_shown, table_of_files=files)
    write_page(path, title, body)
