from collections.abc import Callable
from pathlib import Path

import polars as pl

from fvc_lib.analysis.read import queries
from fvc_lib.analysis.read.sql import SQL_EXAMPLES, ask_user_query
from fvc_lib.services import tables
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths
from tests.analysis.task_runs import write_image_run, write_video_text_run

OF_OTHER_TASKS = {"image_predictions", "target_predictions", "retrieval_ranks", "video_texts"}


def test_every_example_answers_its_question_over_real_runs(make_run: Callable[..., RunPaths], tmp_path: Path) -> None:
    run, other = make_run(), make_run(name="run_20250305_000000_abcdef02", seed=4)
    other.params_yaml.write_text(RunConfig(experiment="demo", epochs=3).to_yaml())
    schema = {name: column.dtype.type for name, column in tables.REJECTED.columns.items()}
    rejected = pl.DataFrame([("a.mp4", None, 1, "real", "unreadable", "truncated")], schema=schema, orient="row")
    tables.write_table(rejected, tables.REJECTED, run.rejected)
    of_other_tasks = [write_image_run(tmp_path), write_video_text_run(tmp_path)]
    runs = {name: [run, other, *(of_other_tasks if name in OF_OTHER_TASKS else ())] for name in queries.SQL_TABLES}
    frames = {name: read(runs[name]).frame for name, read in queries.SQL_TABLES.items()}
    answers = {each.name: ask_user_query(each.sql, frames) for each in SQL_EXAMPLES}
    empty = [name for name, rows in answers.items() if rows.is_empty()]
    assert set(empty) <= {"What training chose"}  # these runs keep no outcome.json
    predictions = frames["predictions"]
    wrong = predictions.filter((pl.col("score") >= pl.col("threshold")) != (pl.col("label") == "fake"))
    assert answers["Worst mistakes"].height == min(20, wrong.height)
    assert answers["Calibration"]["num_videos"].sum() == predictions.height
    confused = frames["image_predictions"].filter(pl.col("class_label") != pl.col("predicted_label"))
    assert answers["Confused classes"]["num_images"].sum() == confused.height
    assert answers["Furthest off"].group_by("target").len().sort("target").rows() == [("calories", 5), ("mass", 5)]
    assert answers["Found last"]["rank"].max() == answers["Found last"]["rank"][0] == 5


def test_examples_have_names_and_questions_of_their_own() -> None:
    assert len({each.name for each in SQL_EXAMPLES}) == len(SQL_EXAMPLES)
    assert all(each.question.endswith(("?", ".")) for each in SQL_EXAMPLES)
