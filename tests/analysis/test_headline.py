import datetime
import os
import shutil
from collections.abc import Callable

import polars as pl
import pytest
import yaml
from nbformat.v4 import new_markdown_cell, new_notebook, writes

from fvc_lib.analysis.dashboard.panels import default_selection, panels
from fvc_lib.analysis.mlflow.export import run_content
from fvc_lib.analysis.pages.report import summary_lines, write_run_report
from fvc_lib.analysis.pages.runs_index import write_runs_index
from fvc_lib.analysis.read.cautions import interval_cautions, run_cautions
from fvc_lib.analysis.read.headline import (
    FORGERIES,
    Score,
    floor_margin,
    judge,
    run_headline,
    runs_table,
    what_to_do,
)
from fvc_lib.analysis.read.naming import run_labels, run_marks
from fvc_lib.analysis.wording import interval_text, source_name
from fvc_lib.services import tables
from fvc_lib.services.atomic_files import write_json, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import command_text
from fvc_lib.services.run_paths import RunPaths
from tests.analysis.memory_story import StoryWriter

MODEL = Score("model", 0.8, 0.7, 0.9)
CONSTANT = Score("constant", 0.5, 0.5, 0.5)
# Every strict control, each without anything to say.
CHANCE = [Score(source, 0.5, 0.5, 0.5) for source in FORGERIES.strict_controls]


@pytest.mark.parametrize(
    ("scores", "standing", "best"),
    [
        ([MODEL, *CHANCE, Score("metadata_only", 0.6, 0.5, 0.7)], "above control", "metadata_only"),
        ([MODEL, Score("metadata_only", 0.69, 0.5, 0.85)], "not above control", "metadata_only"),  # within its interval
        ([Score("model", 0.6, 0.45, 0.7), CONSTANT], "not above control", "constant"),  # its own interval holds 0.5
        ([MODEL, *CHANCE, Score("group_lookup_by_row", 0.99, 0.98, 1.0)], "above control", "constant"),
        ([MODEL], "not shown", None),
        ([MODEL, Score("metadata_only", None)], "not shown", None),
        ([MODEL, CONSTANT, Score("metadata_only", 0.6, 0.5, 0.7)], "not shown", "metadata_only"),
        ([Score("model", 0.8), CONSTANT], "not above control", "constant"),  # without an interval nothing is shown
        ([CONSTANT], "no result", None),
        ([Score("model", None), CONSTANT], "no result", None),
        ([], "no result", None),
    ],
)
def test_the_standing_beside_the_best_honest_control(scores: list[Score], standing: str, best: str | None) -> None:
    verdict = judge(scores)
    assert verdict.standing == standing
    assert (verdict.best_control.source if verdict.best_control else None) == best


def test_the_headline_repeats_what_the_run_recorded(run: RunPaths) -> None:
    headline = run_headline(run)
    table = tables.read_table(run.results, tables.RESULTS)
    row = next(
        r for r in table.iter_rows(named=True) if (r["source"], r["scope"], r["metric"]) == ("model", "all", "roc_auc")
    )
    assert headline.model_score == Score("model", row["value"], row["low"], row["high"])
    assert (headline.num_samples, headline.num_groups) == (96, 24)
    assert (headline.state, headline.peak_rss_bytes, headline.duration_seconds) == ("done", 794_824_876, 185.0)
    assert (headline.model, headline.failure, headline.experiment) == ("frame_cnn", None, "demo")


def test_the_peak_is_the_memory_logs_highest_else_what_the_runner_saw(run: RunPaths) -> None:
    StoryWriter(run).sample(900, "train", epoch=1).sample(2000, "preflight")
    assert run_headline(run).peak_rss_bytes == 2_000_000_000
    shutil.rmtree(run.root / "memory")
    assert run_headline(run).peak_rss_bytes == 812_000_000


def test_a_run_that_has_only_begun_has_a_headline_too(run: RunPaths) -> None:
    for path in (run.results, run.status_json, run.params_yaml):
        path.unlink()
    headline = run_headline(run)
    assert headline.verdict.standing == "no result"
    assert (headline.state, headline.duration_seconds, headline.model, headline.model_score) == (None, None, None, None)
    assert headline.started_utc == "2025-03-04 10:15 (local)"  # from the folder's name
    assert headline.peak_rss_bytes == pytest.approx(795e6, rel=0.01)  # from the memory log


def test_a_failed_stage_is_told_with_its_error(run: RunPaths) -> None:
    error = {"name": "ValueError", "message": "no such <codec>", "cell": 4}
    write_json(
        run.status_json, {"state": "failed", "stages": {"02_folds": {"state": "failed", "error": error}, "x": None}}
    )
    assert run_headline(run).failure == "Stage 02_folds failed: ValueError: no such <codec>"


def test_a_corpus_with_fake_voices_is_said_to_be_judged_by_what_is_seen(run: RunPaths) -> None:
    assert not any("Audio" in each for each in run_headline(run).cautions)
    index = tables.read_table(run.index, tables.INDEX)
    fake_voice = pl.int_range(pl.len()) < 9
    said = pl.when(fake_voice).then(pl.lit('{"audio": "fake", "race": "Asian"}')).otherwise(pl.lit('{"audio": "real"}'))
    tables.write_table(index.with_columns(attributes=said), tables.INDEX, run.index)
    real = index.head(9).filter(label="real").height
    told = f"9 videos of the corpus have a fake voice; {real} of them count as real, because what is seen is."
    assert f"Audio is not judged: {told}" in run_headline(run).cautions


def test_runs_of_different_data_never_look_alike_on_a_list(make_run: Callable[..., RunPaths]) -> None:
    runs = [make_run(name=f"run_20250401_00000{number}_abcdef01") for number in range(3)]
    records = (("clips", "a1"), ("clips", "b2"), ("FaceForensics++", "c3"))
    for run, (corpus, digits) in zip(runs, records, strict=True):
        known = {"name": "folder", "listing_sha256": "0" * 64, "fingerprint": digits * 32, "corpora": [corpus]}
        write_json(run.run_json, {"run_id": run.run_id, "corpus": known})
    labels = run_labels(runs)
    starts = ("clips a1a1a1 · ", "clips b2b2b2 · ", "FaceForensics++ · ")
    assert all(label.startswith(start) for label, start in zip(labels, starts, strict=True))
    assert all(label.endswith(f" / {run.run_id}") for label, run in zip(labels, runs, strict=True))
    html = write_runs_index(runs[0].root.parent.parent).read_text(encoding="utf-8")
    assert all(html.index(start) < html.index(f">{run.run_id}<") for start, run in zip(starts, runs, strict=True))


def test_a_run_from_before_there_was_a_parameter_is_not_told_apart_by_its_default(
    make_run: Callable[..., RunPaths],
) -> None:
    runs = [make_run(name=f"run_20250401_00000{number}_abcdef01") for number in range(4)]
    for run in runs[:2]:
        write_text(run.params_yaml, "task: video\nmodel: frame_cnn\n")
    write_text(runs[2].params_yaml, RunConfig(model="frame_cnn").to_yaml())
    write_text(runs[3].params_yaml, RunConfig(model="frame_cnn", rescale=480).to_yaml())
    assert [differs for _, _, differs in run_marks(runs)] == ["", "", "", "rescale 480"]


def test_a_run_is_called_the_same_in_whatever_order_runs_are_listed(make_run: Callable[..., RunPaths]) -> None:
    runs = [make_run(name=f"run_20250401_00000{number}_abcdef01") for number in range(2)]
    for run, epochs in zip(runs, (2, 3), strict=True):
        write_text(run.params_yaml, RunConfig(epochs=epochs).to_yaml())
    assert [differs for _, _, differs in run_marks(runs)] == ["epochs 2", ""]
    assert [differs for _, _, differs in run_marks(runs[::-1])] == ["", "epochs 2"]


@pytest.mark.parametrize("stages", [None, [], "x", {"a": {"state": 3, "attempts": "two", "duration_seconds": None}}])
def test_a_foreign_status_is_read_as_far_as_it_goes(run: RunPaths, stages: object) -> None:
    write_json(run.status_json, {"state": 5, "peak_rss_bytes": "much", "stages": stages})
    assert run_headline(run).state is None


def test_runs_are_listed_newest_first_with_nulls_for_what_is_missing(make_run: Callable[..., RunPaths]) -> None:
    make_run()
    newer = make_run(experiment="other", name="run_20250401_000000_abcdef01")
    newer.results.unlink()
    (newer.root.parent / "run_20250402_000000_never_began").mkdir()
    answer = runs_table(newer.root.parent.parent)
    assert answer.frame["run_id"].to_list() == ["run_20250401_000000_abcdef01", "run_20250304_101500_abcdef01"]
    assert answer.frame["standing"].to_list() == ["no result", "above control"]
    assert answer.frame["score"].null_count() == 1
    assert answer.frame["best_control"].to_list()[1] in ("metadata_only", "shuffled_labels")


def test_no_number_counts_where_the_leakage_audit_did_not_pass(run: RunPaths) -> None:
    audit = tables.read_table(run.leakage_audit, tables.LEAKAGE_AUDIT)
    assert run_headline(run).verdict.standing == "above control"
    failed = pl.col("check") == audit.filter(pl.col("passed").is_not_null())["check"][0]
    spoiled = audit.with_columns(passed=pl.when(failed).then(pl.lit(value=False)).otherwise("passed"))
    tables.write_table(spoiled, tables.LEAKAGE_AUDIT, run.leakage_audit)
    verdict = run_headline(run).verdict
    assert verdict.standing == "not above control"
    assert audit.filter(failed)["finding"][0] in verdict.sentence


def test_an_interval_without_width_and_a_one_sided_bound_are_said_beside_the_number() -> None:
    assert interval_cautions(0.75, 0.7, 0.8) == ()
    assert interval_cautions(0.75, None, None) == ()
    assert len({*interval_cautions(0.5, 0.5, 0.5), *interval_cautions(1.0, 0.86, 1.0)}) == 2


def test_every_honest_control_counts_not_only_the_best_one() -> None:
    model, wide = Score("model", 0.7, 0.55, 0.85), Score("metadata_only", 0.49, 0.3, 0.78)
    assert judge([model, *CHANCE]).standing == "above control"
    told = judge([model, *CHANCE, wide])
    assert told.standing == "not above control"
    assert told.best_control == wide


def test_a_control_that_learns_shuffled_labels_is_called_a_leak() -> None:
    told = judge([Score("model", 0.99, 0.97, 1.0), Score("shuffled_labels", 0.8, 0.65, 0.9)])
    assert told.standing == "not above control"
    assert "Something leaks, or" in told.sentence  # an interval can miss: no proof of a leak
    assert "0.800 [0.650, 0.900]" in told.sentence
    others = [score for score in CHANCE if score.source != "shuffled_labels"]
    below = judge([Score("model", 0.99, 0.97, 1.0), *others, Score("shuffled_labels", 0.3, 0.1, 0.45)])
    assert below.standing == "above control"


@pytest.mark.parametrize("missing", FORGERIES.strict_controls)
def test_without_a_strict_control_nothing_is_claimed_and_all_pages_say_how_to_get_it(
    run: RunPaths, missing: str
) -> None:
    assert run_headline(run).verdict.standing == "above control"
    write_results(run, tables.read_table(run.results, tables.RESULTS).filter(pl.col("source") != missing))
    verdict = run_headline(run).verdict
    assert verdict.standing == "not shown"
    write_report_of(run)
    write_runs_index(run.root.parents[1])
    panel = next(panel for panel in panels() if panel.name == "controls")
    pages = {
        "report": run.report_html.read_text(),
        "terminal": "\n".join(summary_lines(run)),
        "index": (run.root.parents[1] / "index.html").read_text(),
        "runs": runs_table(run.root.parents[1]).frame["verdict"][0],
        "dashboard": panel.draw(default_selection(run.root.parents[1])).layout.title.text.replace("<br>", " "),
        "mlflow": run_content(run).whole.tags["mlflow.note.content"].replace("\\", ""),
    }
    command = FORGERIES.strict_controls[missing].replace("RUN", str(run.root))
    command = command.replace("run_notebooks.py", command_text())
    for page, text in pages.items():
        assert f"Missing: {source_name(missing).lower()}" in text, page
        assert command.replace(" ", "") in text.replace(" ", ""), page  # a figure's title breaks a long path


def test_the_terminal_says_how_many_listed_files_were_left_out_and_why(run: RunPaths) -> None:
    assert "not used" not in "\n".join(summary_lines(run))
    reasons = ("conflicting_labels", "conflicting_labels", "unreadable")
    rows = [{"path": f"{number}.mp4", "reason": reason, "detail": "why"} for number, reason in enumerate(reasons)]
    tables.write_table(pl.DataFrame(rows, schema=tables.column_types(tables.REJECTED)), tables.REJECTED, run.rejected)
    assert "3 listed files were left out (2 conflicting labels, 1 unreadable)" in "\n".join(summary_lines(run))


def test_where_one_answer_to_all_does_better_the_headline_says_it(run: RunPaths) -> None:
    worse = {
        ("model", "f1"): 0.614, ("constant", "f1"): 0.752, ("model", "accuracy"): 0.58, ("constant", "accuracy"): 0.4,
    }  # fmt: skip
    rows = [
        {**row, "value": worse.get((row["source"], row["metric"]), row["value"])}
        for row in tables.read_table(run.results, tables.RESULTS).iter_rows(named=True)
    ]
    assert not any("is below that of" in caution for caution in run_headline(run).cautions)
    template = next(row for row in rows if row["source"] == "model")
    there = {(row["source"], row["metric"]) for row in rows}
    rows += [
        {**template, "source": source, "scope": "all", "metric": metric, "value": value}
        for (source, metric), value in worse.items() if (source, metric) not in there
    ]  # fmt: skip
    write_results(run, pl.DataFrame(rows, schema=tables.read_table(run.results, tables.RESULTS).schema))
    cautions = run_headline(run).cautions
    assert "F1 0.614 is below that of calling every video fake (0.752)." in cautions
    assert "Accuracy 0.580 is below that of always giving the more frequent label (0.600)." in cautions
    assert "F1 0.614 is below" in "\n".join(summary_lines(run))
    write_text(run.params_yaml, RunConfig(operating_point="cost=5:1").to_yaml())
    assert "F1 0.614 at the operating point cost=5:1 is below" in "\n".join(summary_lines(run))


@pytest.mark.parametrize("state", ["failed", "pending", "interrupted"])
def test_the_numbers_of_an_earlier_attempt_are_marked_as_such(run: RunPaths, state: str) -> None:
    then = datetime.datetime(2025, 3, 4, 10, 20, tzinfo=datetime.UTC).timestamp()
    os.utime(run.results, (then, then))
    starts = ["2025-03-04T10:15:00Z", "2025-03-05T09:00:00Z"]
    write_json(run.run_json, {"attempts": [{"started_utc": start} for start in starts]})
    stage = {"state": state, "attempts": 2, "started_utc": starts[1], "finished_utc": "2025-03-05T09:01:00Z"}
    write_json(run.status_json, {"state": "failed", "stages": {"05_kfold_results": stage}})
    headline = run_headline(run)
    assert headline.verdict.standing == "no result"
    mark = "of an earlier attempt, number 1, written 2025-03-04 10:20 UTC: 05_kfold_results is " + state
    write_report_of(run)
    write_runs_index(run.root.parents[1])
    assert f"ROC-AUC with interval, {mark}" in "\n".join(summary_lines(run))
    assert mark in run.report_html.read_text()
    assert "no result" in (run.root.parents[1] / "index.html").read_text()
    assert mark in run_content(run).whole.tags["fvc.verdict"]


def test_a_model_is_above_a_floor_that_is_shown_or_claims_nothing_and_the_margin_is_told() -> None:
    shown, chance = Score("real_source_floor", 0.97, 0.9, 0.99), Score("real_source_floor", 0.7, 0.4, 0.95)
    assert judge([MODEL, *CHANCE, chance]).standing == "above control"
    unsure = Score("real_source_floor", 0.97, 0.49, 0.99)
    assert (judge([MODEL, *CHANCE, unsure]).standing, judge([MODEL, *CHANCE, unsure]).best_control) == (
        "not shown",
        unsure,
    )
    denied = judge([MODEL, *CHANCE, shown])
    assert (denied.standing, denied.best_control) == ("not above control", shown)
    (told,) = floor_margin([MODEL, shown])
    assert told.startswith("The model recognises the corpus: ")
    assert f"(floor); fakes from reals with {0.97 - MODEL.value:.3f} less. No model" in told
    assert "is not shown to recognise" in floor_margin([MODEL, chance])[0]
    assert floor_margin([MODEL]) == ()


def test_a_trained_floor_is_told_with_its_margin_and_one_that_is_missing_weakens_the_claim(run: RunPaths) -> None:
    assert run_headline(run).verdict.standing == "above control"
    results = tables.read_table(run.results, tables.RESULTS)

    def rows(**values: tuple[float | None, ...]) -> pl.DataFrame:
        found = [("real_source_control", "all", name, *ends, None, None, 40, 20) for name, ends in values.items()]
        return pl.concat([results, pl.DataFrame(found, schema=results.schema, orient="row")])

    write_results(run, rows(roc_auc=(0.62, 0.55, 0.7), margin_over_floor=(0.33, 0.2, 0.4)))
    told = run_headline(run)
    assert told.verdict.standing == "above control"
    (sentence,) = [each for each in told.sentences if "where a real comes from" in each]
    assert sentence.startswith("The detector recognises where a real comes from")
    assert interval_text(0.62, 0.55, 0.7) in sentence
    assert interval_text(0.33, 0.2, 0.4) in sentence
    write_results(run, rows(roc_auc=(0.5, 0.4, 0.6)))
    assert run_headline(run).verdict.standing == "above control"
    write_results(run, rows(roc_auc=(None, None, None)))
    lacking = run_headline(run).verdict
    assert lacking.standing == "not shown"
    assert "--force 04 --resume" in lacking.sentence
    write_text(run.params_yaml, RunConfig(real_source_control=False).to_yaml())
    assert "--fork -p real_source_control true" in run_headline(run).verdict.sentence


def test_a_trial_is_marked_wherever_the_run_is_named_and_claims_nothing(run: RunPaths) -> None:
    assert run_headline(run).verdict.standing == "above control"
    write_text(run.params_yaml, RunConfig(dev_groups=20).to_yaml())
    write_json(run.run_json, {"corpus": {"name": "mine"}})
    told = run_headline(run)
    assert (told.verdict.standing, told.verdict.sentence) == (
        "not shown", "This is a trial on 20 groups: it claims nothing of the corpus.",
    )  # fmt: skip
    assert told.corpus == "mine, not indexed yet, trial on 20 groups"
    assert run_marks([run])[0][2] == "trial on 20 groups"
    said = "This is a trial on 20 groups: it claims nothing of the corpus."
    assert run_cautions(run)[0] == said
    wins = (pl.col("source") == "constant") & (pl.col("scope") == "all") & (pl.col("metric") == "roc_auc")
    raised = [pl.when(wins).then(0.99).otherwise(name).alias(name) for name in ("value", "low", "high")]
    write_results(run, tables.read_table(run.results, tables.RESULTS).with_columns(raised))
    told = run_headline(run)
    assert (told.verdict.standing, said in told.cautions) == ("not above control", True)
    assert [line.strip() for line in summary_lines(run)].count(said) == 1


def test_what_must_be_said_of_a_run_names_leaks_damage_and_how_it_was_asked_for(run: RunPaths) -> None:
    assert not [told for told in run_cautions(run) if "synthetic" not in told]
    write_text(run.params_yaml, RunConfig(corpus="/mine", protocol="official", shuffle_labels=True).to_yaml())
    audit = tables.read_table(run.leakage_audit, tables.LEAKAGE_AUDIT)
    row = {"check": "group_overlap", "count": 1, "number": None, "finding": "g lies in two folds.", "passed": False}
    leak = {"check": "official_split_leaks", "count": 7, "number": None, "finding": "7 groups leak.", "passed": None}
    added = pl.DataFrame([row, leak], schema=audit.schema)
    tables.write_table(pl.concat([audit, added]), tables.LEAKAGE_AUDIT, run.leakage_audit)
    assert run_cautions(run) == (
        "The leakage audit did not pass: g lies in two folds.",
        "7 groups leak.",
        "Labels were shuffled by group on purpose: anything but chance would be a leak.",
    )


def test_the_numbers_that_the_last_attempt_wrote_before_it_failed_are_its_own(run: RunPaths) -> None:
    written = datetime.datetime(2025, 3, 5, 9, 0, 30, tzinfo=datetime.UTC).timestamp()
    os.utime(run.results, (written, written))
    stage = {"state": "failed", "started_utc": "2025-03-05T09:00:00Z", "finished_utc": "2025-03-05T09:01:00Z"}
    write_json(run.status_json, {"state": "failed", "stages": {"05_kfold_results": stage}})
    assert run_headline(run).verdict.standing == "above control"


@pytest.mark.parametrize(
    ("control", "why"), [("metadata_only", "Carried by width."), ("length_only", "how long a video is")]
)
def test_beside_a_control_that_wins_stands_once_why_and_what_to_do(run: RunPaths, control: str, why: str) -> None:
    audit = tables.read_table(run.leakage_audit, tables.LEAKAGE_AUDIT)
    row = {"check": "metadata_carriers", "count": None, "number": 0.9, "finding": "Carried by width.", "passed": None}
    tables.write_table(
        pl.concat([audit, pl.DataFrame([row], schema=audit.schema)]), tables.LEAKAGE_AUDIT, run.leakage_audit
    )
    assert "width" not in " ".join(run_headline(run).sentences)
    table = tables.read_table(run.results, tables.RESULTS)
    wins = (pl.col("source") == control) & (pl.col("scope") == "all") & (pl.col("metric") == "roc_auc")
    raised = [pl.when(wins).then(0.99).otherwise(name).alias(name) for name in ("value", "low", "high")]
    write_results(run, table.with_columns(raised))
    told = run_headline(run).sentences
    assert f"not above its control ({source_name(control).lower()}" in told[0]
    assert [why in sentence and "To do about it: " in sentence for sentence in told].count(True) == 1


def test_the_terminal_says_how_many_clips_no_training_of_the_protocol_takes(run: RunPaths) -> None:
    assert "no part in this protocol" not in "\n".join(summary_lines(run))
    known = [("a", 0, "train"), ("a", 1, "left_out"), ("b", 0, "test"), ("b", 1, "train"), ("c", 0, "left_out"),
             ("c", 1, "left_out")]  # fmt: skip
    rows = [
        {"protocol": "official", "target": None, "part": part, "fold": fold, "reason": None, "video_id": video,
         "group_id": video, "label": "real"}
        for video, fold, part in known
    ]  # fmt: skip
    columns = {name: [row[name] for row in rows] for name in tables.PROTOCOL.columns}
    tables.write_table(tables.frame_of(columns, tables.PROTOCOL), tables.PROTOCOL, run.protocol)
    assert "1 more takes no part in this protocol; their clips were made as well" in "\n".join(summary_lines(run))


@pytest.mark.parametrize(
    ("control", "asked", "advised", "not_advised"),
    [
        ("metadata_only", {}, ["metadata_matched", "canonical true", "add reals"], []),
        ("metadata_only", {"protocol": "metadata_matched"}, ["canonical true", "add reals"], ["matched"]),
        ("metadata_only", {"protocol": "leave_one_generator_out", "canonical": True}, ["add reals"],
         ["matched", "canonical"]),
        ("length_only", {"protocol": "length_matched"}, ["how long", "add reals"], ["-p protocol"]),
        ("real_source_floor", {"protocol": "cross_corpus"}, ["add reals"], ["-p protocol"]),
    ],
)  # fmt: skip
def test_only_what_would_help_is_advised_against_a_control(
    control: str, asked: dict[str, object], advised: list[str], not_advised: list[str]
) -> None:
    told = what_to_do(Score(control, 0.9, 0.8, 0.95), asked)
    assert [word in told for word in ["To do about it: ", *advised]] == [True] * (len(advised) + 1)
    assert [word in told for word in not_advised] == [False] * len(not_advised)
    at_chance = what_to_do(Score(control, 0.52, 0.41, 0.63), asked)
    assert at_chance.startswith(f"{source_name(control)} is not shown to be above chance itself")


def write_results(run: RunPaths, frame: pl.DataFrame) -> None:
    tables.write_table(frame, tables.RESULTS, run.results)


def write_report_of(run: RunPaths) -> None:
    write_text(run.notebooks / "05_kfold_results.ipynb", writes(new_notebook(cells=[new_markdown_cell("# Results")])))
    write_run_report(run)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_number_on_a_leaking_official_split_claims_nothing(run: RunPaths, recorded: bool) -> None:
    audit = tables.read_table(run.leakage_audit, tables.LEAKAGE_AUDIT)
    said = "7 groups lie in several parts of the corpus's own split."
    named = pl.DataFrame([("official_split_leaks", 7, None, said, None)], schema=audit.schema, orient="row")
    tables.write_table(pl.concat([audit, named]) if recorded else audit, tables.LEAKAGE_AUDIT, run.leakage_audit)
    asked = yaml.safe_load(run.params_yaml.read_text()) if run.params_yaml.exists() else {}
    write_text(run.params_yaml, yaml.safe_dump({**asked, "protocol": "official"}))
    headline = run_headline(run)
    assert headline.verdict.standing == "not shown"
    assert (said if recorded else "What the official split leaks is not recorded.") in headline.verdict.sentence
    assert "-p protocol official_strict" in headline.verdict.sentence
    assert "had seen no video of its group" not in headline.measure.circumstances(10, 5)
    assert "\n".join(summary_lines(run)).count(headline.measure.leaks) == 1
    above = tables.read_table(run.results, tables.RESULTS)
    write_results(run, above.with_columns(value=0.5, low=0.4, high=0.6))
    denied = run_headline(run)
    assert denied.measure.leaks not in denied.verdict.sentence
    assert "\n".join(summary_lines(run)).count(denied.measure.leaks) == 1
    write_results(run, above)
    assert headline.protocol == "official"
    clean = named.with_columns(count=pl.lit(0, pl.Int64))
    tables.write_table(pl.concat([audit, clean]), tables.LEAKAGE_AUDIT, run.leakage_audit)
    assert run_headline(run).verdict.standing == "above control"
