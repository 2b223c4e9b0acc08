"""Functions that make the table of all video scores of a run, and write the results of a run as CSV."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.tables import SCORES, check_table, csv_for_people


def score_table(
    index: pl.DataFrame, predictions: pl.DataFrame, others: Sequence[pl.DataFrame] = (), trial: str = ""
) -> pl.DataFrame:
    """Return the table ``tables.SCORES``: one row with score and decision for each video of ``predictions``.

    Wrongly decided videos come first, then the others. In each of these two parts, the videos whose scores are farthest
    from the threshold come first.

    Args:
        index: rows of ``tables.INDEX``. Only the columns ``video_id path`` are used.
        predictions: rows of ``tables.PREDICTIONS`` of all folds.
        others: predictions of further runs that differ in their seed alone. ``score_std`` is the sample standard
            deviation of a video's score over all these runs, or null for a single run.
        trial: text for the column ``trial`` if the run is on part of its corpus, such as ``trial on 20 groups``.
            Empty: the column is null.
    """
    every = pl.concat([frame.select("video_id", "score") for frame in (predictions, *others)])
    spread = every.group_by("video_id").agg(score_std=pl.col("score").std(), num_seeds=pl.len().cast(pl.Int64))
    rows = predictions.join(index.select("video_id", "path"), on="video_id", how="left")
    distance = pl.col("score") - pl.col("threshold")
    called = pl.when(distance >= 0).then(pl.lit("fake")).otherwise(pl.lit("real"))
    rows = rows.join(spread, on="video_id", how="left")
    rows = rows.with_columns(
        called=called,
        path=pl.col("path").fill_null(pl.col("video_id")),
        trial=pl.lit(trial or None, pl.String),
    )
    rows = rows.with_columns(is_right=pl.col("called") == pl.col("label"))
    table = rows.sort("is_right", -distance.abs(), "video_id").select(list(SCORES.columns))
    return check_table(table, SCORES, "scores")


def write_results(path: Path, results: pl.DataFrame, trial: str = "") -> None:
    """Write the results of a run as a CSV file.

    Args:
        path: path of the file.
        results: rows of ``tables.RESULTS``.
        trial: text for an additional column ``trial``, such as ``trial on 20 groups``. Empty: the column is null.

    Raises:
        OSError: the file cannot be written.
    """
    write_text(path, csv_for_people(results.with_columns(trial=pl.lit(trial or None, pl.String))))
