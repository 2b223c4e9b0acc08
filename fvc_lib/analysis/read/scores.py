"""Tables of the scores of single videos, and the results of a run as CSV."""

from collections.abc import Sequence

import polars as pl

from fvc_lib.analysis.read import queries
from fvc_lib.analysis.read.runs import run_parameters, trial_text
from fvc_lib.services.atomic_files import write_text
from fvc_lib.services.config import NEUTRAL, NOT_HASHED
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import SCORES, check_table, csv_for_people


def score_table(
    index: pl.DataFrame, predictions: pl.DataFrame, others: Sequence[pl.DataFrame] = (), run: RunPaths | None = None
) -> pl.DataFrame:
    """Return the SCORES table: one row for each video of ``predictions``.

    Wrong decisions come first. Within wrong and right ones, scores far from the threshold come first.

    Args:
        index: INDEX schema, or its columns ``video_id path``.
        predictions: PREDICTIONS schema, all folds together.
        others: predictions of further runs that differ in their seed alone. ``score_std`` is the sample standard
            deviation of a video's score over all these runs, or null for a single run.
        run: the run of the predictions, for the column ``trial``.
    """
    every = pl.concat([frame.select("video_id", "score") for frame in (predictions, *others)])
    spread = every.group_by("video_id").agg(score_std=pl.col("score").std(), num_seeds=pl.len().cast(pl.Int64))
    rows = predictions.join(index.select("video_id", "path"), on="video_id", how="left")
    distance = pl.col("score") - pl.col("threshold")
    rows = rows.join(spread, on="video_id", how="left").with_columns(
        called=pl.when(distance >= 0).then(pl.lit("fake")).otherwise(pl.lit("real")),
        path=pl.col("path").fill_null(pl.col("video_id")),
        trial=_trial_column(run),
    )
    rows = rows.with_columns(is_right=pl.col("called") == pl.col("label"))
    table = rows.sort("is_right", -distance.abs(), "video_id").select(list(SCORES.columns))
    return check_table(table, SCORES, "scores")


def _trial_column(run: RunPaths | None) -> pl.Expr:
    """Return a constant column: text such as ``trial on 20 groups`` for a run on part of its corpus, else null."""
    return pl.lit((run and trial_text(run_parameters(run))) or None, pl.String)


def runs_of_other_seeds(run: RunPaths) -> list[pl.DataFrame]:
    """Return the predictions of other runs that differ from ``run`` in the seed alone, and have results.

    Only runs of the same experiment are searched.

    There is one frame per seed; of several runs with the same seed the latest counts. The folds of the runs may
    differ, because no network scores a group that it was trained on.
    """
    frames = {}
    parameters = {**NEUTRAL, **run_parameters(run)}
    for other in map(RunPaths, sorted(run.root.parent.glob("run_*"))):
        others = {**NEUTRAL, **run_parameters(other)}
        names = {*parameters, *others} - NOT_HASHED
        if other.results.is_file() and [name for name in names if parameters.get(name) != others.get(name)] == ["seed"]:
            scored = queries.predictions([other])
            if scored.frame.height and not scored.notes:  # the other run's report names damaged files
                frames[others["seed"]] = scored.frame.drop("run_id")
    return list(frames.values())


def write_results(run: RunPaths, results: pl.DataFrame) -> None:
    """Write ``results``, rows of RESULTS, into the run's CSV file of results.

    Raises:
        OSError: the file cannot be written.
    """
    write_text(run.results_csv, csv_for_people(results.with_columns(trial=_trial_column(run))))
