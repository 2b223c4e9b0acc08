import datetime
import html
import os
import shutil
from collections.abc import Callable

import polars as pl
import pytest
from nbformat.v4 import new_markdown_cell

from fvc_lib.analysis.mlflow import run_tags
from fvc_lib.analysis.pages.report import summary_lines, write_run_report, write_runs_index
from fvc_lib.analysis.read.headline import (
    FORGERIES,
    Score,
    judge,
    run_cautions,
    run_headline,
    runs_table,
    what_to_do,
)
from fvc_lib.analysis.read.runs import run_labels, run_marks
from fvc_lib.analysis.wording import interval_text, source_name
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import read_json_object, write_json, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import command_text
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.tasks.shared_training import LOOP
from tests.analysis.conftest import notebook

MODEL = Score("model", 0.8, 0.7, 0.9)
CONSTANT = Score("constant", 0.5, 0.5, 0.5)
FLOOR = "real_source_floor"
TRIAL = "This is a trial on 20 groups: it claims nothing of the corpus."
# Every strict control, each without anything to say.
CHANCE = [Score(source, 0.5, 0.5, 0.5) for source in FORGERIES.strict_controls]


def mlflow_tags(run: RunPaths) -> dict[str, str]:
    return run_tags(run_headline(run), read_json_object(run.run_json))


@pytest.mark.parametrize(
    ("scores", "standing", "best"),
    [
        ([MODEL, *CHANCE, Score("metadata_only", 0.6, 0.5, 0.7)], "above control", "metadata_only"),
        ([MODEL, Score("metadata_only", 0.69, 0.5, 0.85)], "not above control", "metadata_only"),  # within its interval
        ([MODEL, *CHANCE, Score("length_only", 0.49, 0.3, 0.85)], "not above control", "length_only"),  # the wider one
        ([Score("model", 0.6, 0.45, 0.7), CONSTANT], "not above control", "constant"),  # its own interval holds 0.5
        ([MODEL, *CHANCE, Score("group_lookup_by_row", 0.99, 0.98, 1.0)], "above control", "constant"),
        ([MODEL], "not shown", None),
        ([MODEL, CONSTANT, Score("metadata_only", 0.6, 0.5, 0.7)], "not shown", "metadata_only"),
        ([Score("model", 0.8), CONSTANT], "not above control", "constant"),  # without an interval nothing is shown
        ([MODEL, Score("shuffled_labels", 0.8, 0.65, 0.9)], "not above control", "shuffled_labels"),
        ([MODEL, *CHANCE[:-1], Score(CHANCE[-1].source, 0.3, 0.1, 0.45)], "above control", "constant"),
        ([MODEL, *CHANCE, Score(FLOOR, 0.7, 0.4, 0.95)], "above control", "constant"),
        ([MODEL, *CHANCE, Score(FLOOR, 0.97, 0.49, 0.99)], "not shown", FLOOR),
        ([MODEL, *CHANCE, Score(FLOOR, 0.97, 0.9, 0.99)], "not above control", FLOOR),
        ([CONSTANT], "no result", None),
        ([Score("model", None), CONSTANT], "no result", None),
    ],
)
def test_the_standing_beside_the_best_honest_control(scores, standing, best):
    verdict = judge(scores)
    assert verdict.standing == standing
    assert (verdict.best_control.source if verdict.best_control else None) == best


def test_the_headline_repeats_what_the_run_recorded(run: RunPaths) -> None:
    headline = run_headline(run)
    table = tables.read_table(run.results, tables.RESULTS)
    row = table.filter(source="model", scope="all", metric="roc_auc").row(0, named=True)
    assert headline.model_score == Score("model", row["value"], row["low"], row["high"])
    assert (headline.num_samples, headline.num_groups) == (96, 24)
    assert (headline.state, headline.peak_rss_bytes, headline.duration_seconds) == ("done", 794_824_876, 185.0)
    assert (headline.model, headline.failure, headline.experiment) == ("frame_cnn", None, "demo")
    error = {"name": "ValueError", "message": "no such <codec>", "cell": 4}
    stages = {"02_folds": {"state": "failed", "error": error}, "x": None}
    write_json(run.status_json, {"state": 5, "duration_seconds": "much", "stages": stages})
    assert (run_headline(run).failure, run_headline(run).state) == (
        "Stage 02_folds failed: ValueError: no such <codec>",
        None,
    )
    for path in (run.results, run.status_json, run.params_yaml):
        path.unlink()
    begun = run_headline(run)
    assert begun.verdict.standing == "no result"
    assert (begun.state, begun.duration_seconds, begun.model, begun.model_score) == (None, None, None, None)
    assert begun.peak_rss_bytes == pytest.approx(795e6, rel=0.01)  # from the memory log
    shutil.rmtree(run.root / "memory")
    write_json(run.status_json, {"peak_rss_bytes": 812_000_000})
    assert run_headline(run).peak_rss_bytes == 812_000_000


def of_model(run: RunPaths, source: str, metric: str, *values: float | None) -> None:
    """Write one number over all folds into the run's results."""
    table = tables.read_table(run.results, tables.RESULTS)
    others = table.filter(~((pl.col("source") == source) & (pl.col("scope") == "all") & (pl.col("metric") == metric)))
    row = (source, "all", metric, *values, None, None, 40, 20)
    write_results(run, pl.concat([others, pl.DataFrame([row], schema=table.schema, orient="row")]))


def test_a_trained_floor_stands_with_its_margin_and_one_without_a_value_weakens_the_claim(run: RunPaths) -> None:
    of_model(run, "real_source_control", "margin_over_floor", 0.33, 0.2, 0.4)
    of_model(run, "real_source_control", "roc_auc", 0.62, 0.55, 0.7)
    headline = run_headline(run)
    assert headline.verdict.standing == "above control"
    (sentence,) = [caution for caution in headline.cautions if "where a real comes from" in caution]
    assert interval_text(0.62, 0.55, 0.7) in sentence
    (margin,) = [caution for caution in headline.cautions if "margin" in caution]
    assert interval_text(0.33, 0.2, 0.4) in margin
    of_model(run, "real_source_control", "roc_auc", None, None, None)
    lacking = run_headline(run).verdict
    assert lacking.standing == "not shown"
    assert "--force 04 --resume" in lacking.sentence
    write_text(run.params_yaml, RunConfig(real_source_control=False).to_yaml())
    assert "--fork -p real_source_control true" in run_headline(run).verdict.sentence


def test_a_trial_is_marked_wherever_the_run_is_named_and_claims_nothing(run: RunPaths) -> None:
    write_text(run.params_yaml, RunConfig(dev_groups=20).to_yaml())
    write_json(run.run_json, {"corpus": {"name": "mine"}})
    headline = run_headline(run)
    assert (headline.verdict.standing, headline.verdict.sentence) == ("not shown", TRIAL)
    assert headline.corpus == "mine, not indexed yet, trial on 20 groups"
    assert run_marks([run])[0][2] == "trial on 20 groups"
    assert run_cautions(run)[0] == TRIAL
    of_model(run, "constant", "roc_auc", 0.99, 0.99, 0.99)
    headline = run_headline(run)
    assert (headline.verdict.standing, TRIAL in headline.cautions) == ("not above control", True)
    assert [line.strip() for line in summary_lines(run)].count(TRIAL) == 1


@pytest.mark.slow
def test_the_numbers_of_an_earlier_attempt_are_marked_as_such(run: RunPaths) -> None:
    stage = {"state": "failed", "attempts": 2, "started_utc": "2025-03-05T09:00:00Z"}
    write_json(run.status_json, {"state": "failed", "stages": {"05_kfold_results": stage}})
    for hour, is_own in ((10, True), (8, False)):
        written = datetime.datetime(2025, 3, 5, hour, tzinfo=datetime.UTC).timestamp()
        os.utime(run.results, (written, written))
        assert run_headline(run).verdict.standing == ("above control" if is_own else "no result")
    mark = "of an earlier attempt, written 2025-03-05 08:00 UTC: 05_kfold_results is failed"
    assert f"ROC-AUC with interval, {mark}" in "\n".join(summary_lines(run))
    assert mark in mlflow_tags(run)["fvc.verdict"]
    write_json(run.status_json, {"state": "failed", "stages": {"05_kfold_results": {**stage, "state": "done"}}})
    assert "ROC-AUC with interval, of attempt 2 of 05_kfold_results" in "\n".join(summary_lines(run))


@pytest.mark.parametrize("recorded", [True, False])
def test_a_number_on_a_leaking_official_split_claims_nothing(run: RunPaths, recorded: bool) -> None:
    audit = tables.read_table(run.leakage_audit, tables.LEAKAGE_AUDIT)
    leak = "7 groups lie in several parts of the corpus's own split."
    named = pl.DataFrame([("official_split_leaks", 7, None, leak, None)], schema=audit.schema, orient="row")
    tables.write_table(pl.concat([audit, named]) if recorded else audit, tables.LEAKAGE_AUDIT, run.leakage_audit)
    write_text(run.params_yaml, RunConfig(protocol="official").to_yaml())
    headline = run_headline(run)
    assert (headline.verdict.standing, headline.protocol) == ("not shown", "official")
    assert (leak if recorded else "What the official split leaks is not recorded.") in headline.verdict.sentence
    assert "-p protocol official_strict" in headline.verdict.sentence
    assert "that it had seen" not in headline.measure.circumstances(10, 5)
    assert "\n".join(summary_lines(run)).count(headline.measure.leaks) == 1
    clean = named.with_columns(count=pl.lit(0, pl.Int64))
    tables.write_table(pl.concat([audit, clean]), tables.LEAKAGE_AUDIT, run.leakage_audit)
    assert run_headline(run).verdict.standing == "above control"


def test_beside_a_control_that_wins_stand_its_columns_and_what_helps_against_it(run: RunPaths) -> None:
    audit = tables.read_table(run.leakage_audit, tables.LEAKAGE_AUDIT)
    row = pl.DataFrame([("metadata_carriers", None, 0.9, "Carried by width.", None)], schema=audit.schema, orient="row")
    tables.write_table(pl.concat([audit, row]), tables.LEAKAGE_AUDIT, run.leakage_audit)
    assert "width" not in " ".join(run_headline(run).sentences)
    of_model(run, "metadata_only", "roc_auc", 0.99, 0.99, 0.99)
    text = " ".join(run_headline(run).sentences)
    assert [fact in text for fact in ("Carried by width.", "-p protocol metadata_matched", "-p canonical true")] == [
        True
    ] * 3
    wins = Score("length_only", 0.9, 0.8, 0.95)
    assert "length_matched" in what_to_do(wins)
    assert "not shown to be above chance" in what_to_do(Score("length_only", 0.52, 0.41, 0.63))


def test_runs_of_different_data_never_look_alike_on_a_list(make_run: Callable[..., RunPaths]) -> None:
    runs = [make_run(name=f"run_20250401_00000{number}_abcdef01") for number in range(3)]
    records = (("clips", "a1"), ("clips", "b2"), ("FaceForensics++", "c3"))
    for run, (corpus, digits) in zip(runs, records, strict=True):
        known = {"name": "folder", "listing_sha256": "0" * 64, "fingerprint": digits * 32, "corpora": [corpus]}
        write_json(run.run_json, {"run_id": run.run_id, "corpus": known})
    labels = run_labels(runs)
    starts = ("clips a1a1a1 · ", "clips b2b2b2 · ", "FaceForensics++ c3c3c3 · ")
    assert all(label.startswith(start) for label, start in zip(labels, starts, strict=True))
    assert all(label.endswith(f" / {run.run_id}") for label, run in zip(labels, runs, strict=True))
    html = write_runs_index(runs[0].root.parent.parent).read_text(encoding="utf-8")
    assert all(html.index(start) < html.index(f">{run.run_id}<") for start, run in zip(starts, runs, strict=True))


def test_without_a_strict_control_nothing_is_claimed_and_all_pages_say_how_to_get_it(run: RunPaths) -> None:
    missing = next(iter(FORGERIES.strict_controls))
    assert run_headline(run).verdict.standing == "above control"
    write_results(run, tables.read_table(run.results, tables.RESULTS).filter(pl.col("source") != missing))
    verdict = run_headline(run).verdict
    assert verdict.standing == "not shown"
    notebook(run.executed_notebook("05_kfold_results"), new_markdown_cell("# Results"))
    write_run_report(run)
    pages = {
        "report": run.report_html.read_text(),
        "terminal": "\n".join(summary_lines(run)),
        "runs": runs_table(run.root.parents[1]).frame["verdict"][0],
        "mlflow": mlflow_tags(run)["mlflow.note.content"],
    }
    command = FORGERIES.strict_controls[missing].replace("RUN", str(run.root))
    command = command.replace("run_notebooks.py", command_text())
    for page, text in pages.items():
        assert f"Missing: {source_name(missing).lower()}" in text, page
        assert command.replace(" ", "") in text.replace(" ", ""), page  # a figure's title breaks a long path


def test_what_must_be_said_of_a_run_names_leaks_damage_and_how_it_was_asked_for(run: RunPaths) -> None:
    assert not [told for told in run_cautions(run) if "synthetic" not in told]
    write_text(run.params_yaml, RunConfig(corpus="/mine", protocol="official", shuffle_labels=True).to_yaml())
    audit = tables.read_table(run.leakage_audit, tables.LEAKAGE_AUDIT)
    row = {"check": "group_overlap", "count": 1, "number": None, "finding": "g lies in two folds.", "passed": False}
    leak = {"check": "official_split_leaks", "count": 7, "number": None, "finding": "7 groups leak.", "passed": None}
    added = pl.DataFrame([row, leak], schema=audit.schema)
    tables.write_table(pl.concat([audit, added]), tables.LEAKAGE_AUDIT, run.leakage_audit)
    read = {"fingerprint": {"inputs": {"params.yaml": "that of another file", "kfold_results.csv": "missing"}}}
    write_document(run.stage_checkpoint("05_kfold_results"), read)
    write_document(run.fold_checkpoints(0) / LOOP, {"loop": {}, "network": ["__main__.MyNet", ""]})
    assert run_cautions(run) == (
        "The leakage audit did not pass: g lies in two folds.",
        "7 groups leak.",
        f"Written again since these results: params.yaml. Go on: {command_text('--resume', run.root)}",
        "Trained was MyNet of a notebook's cell, not the model that the parameters name.",
        "Labels were shuffled by group on purpose: anything but chance would be a leak.",
    )
    notebook(run.executed_notebook("05_kfold_results"), new_markdown_cell("# Results"))
    write_run_report(run)
    assert "Trained was MyNet of a notebook's cell" in html.unescape(run.report_html.read_text())
    write_document(run.stage_checkpoint("05_kfold_results"), {"fingerprint": None})  # of USE_MLOPS_PIPELINE=false
    assert not [told for told in run_cautions(run) if "Written again" in told]


def write_results(run: RunPaths, frame: pl.DataFrame) -> None:
    tables.write_table(frame, tables.RESULTS, run.results)
