"""The headline of a run: its main score, its controls, and whether the score is above them.

A control is a simple predictor that a detector must beat, such as metadata alone. A floor is a control that tells two
sources of real videos apart: it shows how far a score may come from recognising sources.
"""

import os
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import polars as pl

from fvc_lib.analysis.read.cautions import (
    audit_failures,
    fake_voices,
    interval_cautions,
    leakage_audit_of,
    official_leaks,
    parameter_cautions,
    protocol_cautions,
    trial_caution,
    untested_classes,
    weaker_than_one_answer,
)
from fvc_lib.analysis.read.naming import (
    corpus_text,
    ensemble_text,
    model_name,
    protocol_text,
    recorded_corpora,
    run_marks,
    run_parameters,
    run_task,
)
from fvc_lib.analysis.read.queries import memory_peaks, results
from fvc_lib.analysis.read.records import Answer, earlier_attempt, failure, read_tables, run_status
from fvc_lib.analysis.wording import count_text, interval_text, metric_name, number_text, source_name, subject_name
from fvc_lib.metrics.intervals import is_above_control
from fvc_lib.services.atomic_files import as_text, path_to_text
from fvc_lib.services.errors import command_text
from fvc_lib.services.records.digests import run_damage
from fvc_lib.services.records.ensembles import is_ensemble
from fvc_lib.services.run_paths import ATTEMPT_VARIABLE, RunPaths, list_runs
from fvc_lib.services.tables import TASK_RESULTS
from fvc_lib.services.tasks import CROSS_CORPUS, DEFAULT_TASK, LENGTH_MATCHED, METADATA_MATCHED, TASKS

HEADLINE_METRIC = "roc_auc"
CHANCE_AUC = 0.5
# The score of a split by rows, shown to make that leak visible; no verdict compares with it.
DISHONEST_CONTROLS = frozenset({"group_lookup_by_row"})
METADATA_ONLY = "metadata_only"
LENGTH_ONLY = "length_only"
REAL_SOURCE_FLOOR = "real_source_floor"  # of the model's own scores
REAL_SOURCE_CONTROL = "real_source_control"  # of the same detector trained on the sources
MARGIN = "margin_over_floor"
# A fork reuses the checkpoints of a run without this control; otherwise the folds train again.
_HOW_TO_TRAIN_ON_SOURCES = {
    True: "run_notebooks.py --resume RUN --fork -p real_source_control true",
    False: "run_notebooks.py --force 04 --resume RUN",
}
# Against a control: the parameter that helps, and how.
_REMEDIES = (
    (METADATA_ONLY, "protocol", METADATA_MATCHED, "train and test on videos alike in codec, size and length"),
    (METADATA_ONLY, "canonical", True, "measure re-encoded videos, if the container carries the labels"),
    (METADATA_ONLY, "rescale", 480, "measure rescaled videos, if size and rate carry the labels"),
    (LENGTH_ONLY, "protocol", LENGTH_MATCHED, "train and test on videos of alike lengths"),
    (REAL_SOURCE_FLOOR, "protocol", CROSS_CORPUS, "test on another corpus"),
    (REAL_SOURCE_CONTROL, "protocol", CROSS_CORPUS, "test on another corpus"),
)
_MORE_REALS = {
    METADATA_ONLY: "add reals with the metadata of the fakes",
    LENGTH_ONLY: "add reals as long as the fakes",
    REAL_SOURCE_FLOOR: "add reals from where the fakes come from",
    REAL_SOURCE_CONTROL: "add reals from where the fakes come from",
}
Standing = Literal["above control", "not above control", "not shown", "no result"]


@dataclass(frozen=True)
class Score:
    """The score of the model or of a control, with the ends of its interval if they were computed.

    ``source`` is ``model`` or the name of a control.
    """

    source: str
    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def text(self) -> str:
        """The source with its value and interval, as text."""
        return f"{source_name(self.source).lower()}, {interval_text(self.value, self.low, self.high)}"


@dataclass(frozen=True)
class Measure:
    """The metric of a headline, and what was judged by it.

    Attributes:
        name: name of the metric.
        one: name of a sample in the singular, such as ``video``.
        chance: the score of guessing; None if it depends on the corpus.
        remark: a sentence on the limits of the score.
        is_split_in_folds: whether folds cover all samples; else only a test part was judged.
        strict_controls: the controls that must have a value before the model can be above its controls. Maps the name
            of a control to the command that computes it.
        is_of_classes: whether the score covers all classes together.
        leaks: a sentence on the leaks of the official split that the run used; empty if there are none.
    """

    name: str
    one: str
    chance: float | None = None
    remark: str = ""
    is_split_in_folds: bool = False
    strict_controls: Mapping[str, str] = field(default_factory=dict)
    is_of_classes: bool = False
    leaks: str = ""

    def circumstances(self, num_samples: int | None, num_groups: int | None) -> str:
        """Return sentences on the number of samples and groups, and on whether test groups were used in training."""
        if num_samples is None or num_groups is None:
            return f"How many {self.one}s were judged is not recorded."
        where = "" if self.is_split_in_folds else " of the test part"
        counted = f"{count_text(num_samples, self.one)}{where}, in {count_text(num_groups, 'group')}"
        unseen = self.leaks or f"No model judged {self.one}s of a group that it had seen."
        return f"{counted}, were judged once. {unseen} {self.remark}".strip()


FORGERIES = Measure(
    "ROC AUC",
    "video",
    chance=CHANCE_AUC,
    remark="The score is visual-forensic: staged or out-of-context footage cannot be told by pixels.",
    is_split_in_folds=True,
    strict_controls=TASKS[DEFAULT_TASK].strict_controls[""],
)


@dataclass(frozen=True)
class MeasuredScores:
    """The scores of the model and its controls by one measure.

    Attributes:
        measure: the measure of the scores.
        scores: the scores, that of the model first.
        num_samples: number of samples that were judged; None if it is not recorded.
        num_groups: number of groups of the samples; None if it is not recorded.
        notes: sentences on files that cannot be read.
        cautions: sentences on the limits of the scores.
        earlier: the earlier attempt that made the scores; empty if the last attempt made them.
        margin: score of the model minus that of the detector trained to tell sources of reals apart.
    """

    measure: Measure
    scores: tuple[Score, ...] = ()
    num_samples: int | None = None
    num_groups: int | None = None
    notes: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    earlier: str = ""
    margin: Score | None = None

    @property
    def model_score(self) -> Score | None:
        """The score of the model; None if there is none."""
        return next((score for score in self.scores if score.source == "model" and score.value is not None), None)


@dataclass(frozen=True)
class Verdict:
    """Whether the model is above its controls, with a sentence that says why and the control that decided."""

    standing: Standing
    sentence: str
    best_control: Score | None = None


@dataclass(frozen=True, kw_only=True)
class ReportHeadline(MeasuredScores):
    """The head of a report: the scores, the verdict and facts about the run. None means "not recorded".

    ``more_facts`` are further facts, as pairs of name and text.
    """

    run_id: str
    experiment: str
    state: str | None
    verdict: Verdict
    peak_rss_bytes: int | None
    duration_seconds: float | None
    started_utc: str | None
    model: str | None
    protocol: str  # empty for folds
    corpus: str | None
    failure: str | None
    more_facts: tuple[tuple[str, str], ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        """The sentence of the verdict, then the cautions."""
        return (self.verdict.sentence, *self.cautions)


# --- Scores on record


def overall_scores(results_frame: pl.DataFrame, metric: str = HEADLINE_METRIC) -> tuple[Score, ...]:
    """Return the scores over all folds: the model, then its controls from the highest to the lowest.

    Controls on a split that leaks (``DISHONEST_CONTROLS``) come last.
    """
    rows = results_frame.filter((pl.col("scope") == "all") & (pl.col("metric") == metric))
    aside = pl.col("source").is_in(sorted(DISHONEST_CONTROLS))
    rows = rows.sort(pl.col("source") != "model", aside, -pl.col("value"), "source", nulls_last=True)
    return tuple(Score(*row) for row in rows.select("source", "value", "low", "high").iter_rows())


def task_scores(results: pl.DataFrame, task: str) -> MeasuredScores:
    """Return the main score of a run without folds, and those of its controls from the highest to the lowest.

    ``results`` are rows of TASK_RESULTS. Without a score of the model, no scores are returned.
    """
    for begins, metric_begins, one in TASKS[task].headline:
        fitting = pl.col("subject").str.starts_with(begins) & pl.col("metric").str.starts_with(metric_begins)
        models = results.filter(fitting, source="model").to_dicts()
        if not models:
            continue
        subject, metric = models[0]["subject"], models[0]["metric"]
        rows = results.filter(subject=subject, metric=metric)
        rows = rows.sort(pl.col("source") != "model", -pl.col("value"), "source", nulls_last=True)
        exact = (pl.col("source") == "chance") & pl.col("low").is_null()  # computed, not estimated
        ends = [pl.when(exact).then("value").otherwise(end).alias(end) for end in ("low", "high")]
        scores = tuple(Score(*row) for row in rows.select("source", "value", *ends).iter_rows())
        name = metric_name(metric) if subject == "all" else f"{metric_name(metric)}, {subject_name(subject)}"
        strict = TASKS[task].strict_controls.get(begins, {})
        measure = Measure(name, one, strict_controls=strict, is_of_classes=subject == "all")
        return MeasuredScores(measure, scores, models[0]["num_samples"], models[0]["num_groups"])
    return MeasuredScores(Measure(*TASKS[task].no_headline))


def measured_scores(run: RunPaths) -> MeasuredScores:
    """Return the main score of a run and those of its controls; ``scores`` is empty while none are recorded."""
    asked = run_parameters(run)
    task = run_task(asked)
    if TASKS[task].headline:
        table, answer = run.task_results, read_tables([(path_to_text(run.run_id), run.task_results)], TASK_RESULTS)
        measured = task_scores(answer.frame, task)
        untested = untested_classes(run) if measured.scores and measured.measure.is_of_classes else []
        measured = replace(measured, notes=answer.notes, cautions=tuple(untested))
    else:
        table, answer = run.results, results([run])
        scores = overall_scores(answer.frame)
        strict = dict(FORGERIES.strict_controls)
        if any(score.source == REAL_SOURCE_CONTROL for score in scores):  # else there were no two sources
            strict[REAL_SOURCE_CONTROL] = _HOW_TO_TRAIN_ON_SOURCES[asked.get("real_source_control") is False]
        measure = replace(FORGERIES, leaks=official_leaks(asked, leakage_audit_of(run).frame), strict_controls=strict)
        margin = next(iter(overall_scores(answer.frame, MARGIN)), None)
        cautions = weaker_than_one_answer(answer.frame, as_text(asked.get("operating_point")) or "best")
        model = answer.frame.filter(scope="all", source="model")
        counts = model.select("num_videos", "num_groups").row(0) if model.height else (None, None)
        if model.height:
            cautions = [*protocol_cautions(asked, answer.frame, HEADLINE_METRIC, recorded_corpora(run)), *cautions]
        measured = MeasuredScores(measure, scores, counts[0], counts[1], answer.notes, tuple(cautions), margin=margin)
    return replace(measured, earlier=earlier_attempt(run, table) if measured.scores else "")


# --- The verdict against the controls


def judge(scores: Sequence[Score], leaks: Sequence[str] = (), measure: Measure = FORGERIES) -> Verdict:
    """Return the verdict: whether the model is above every honest control.

    ``metrics.intervals.is_above_control`` compares the model with each control. The standing "above control"
    also needs a value for each strict control of ``measure``. A network that is above chance on shuffled labels has
    probably seen its test data, so the model is not above its controls.

    Args:
        scores: the scores of the model and its controls.
        leaks: findings of failed leakage checks; with any of them no score counts.
        measure: the measure of the scores.
    """
    known = {score.source: score for score in scores if score.value is not None}
    model = known.pop("model", None)
    if model is None:
        return Verdict("no result", "No result is recorded.")
    missing = _missing(known, measure)
    controls = [control for source, control in known.items() if source not in DISHONEST_CONTROLS]
    # A floor that is not shown above chance denies nothing, but one that may exceed the model leaves the case open.
    unsure = [control for control in controls if _is_uncertain_floor(control)]
    controls = [control for control in controls if control not in unsure]
    best = max(controls, key=lambda score: (score.value or 0.0, score.high or 0.0), default=None)
    if leaks:
        return Verdict("not above control", f"The leakage audit did not pass, so no number counts: {leaks[0]}", best)
    shuffled = known.get("shuffled_labels")
    if shuffled is not None and shuffled.low is not None and shuffled.low > CHANCE_AUC:
        sentence = f"Something leaks, or chance lifts 2 to 5 in 100 runs so far: {shuffled.text}, is above chance."
        return Verdict("not above control", sentence, shuffled)
    in_reach = [
        control for control in controls if not is_above_control(model.value, model.low, control.value, control.high)
    ]
    if in_reach:
        # A control with a lower value may have the wider interval.
        nearest = best if best in in_reach else max(in_reach, key=lambda score: score.high or score.value or 0.0)
        assert nearest is not None
        sentence = f"The model is not above its control ({nearest.text}). {missing}"
        return Verdict("not above control", sentence.strip(), nearest)
    for floor in unsure:
        if (floor.value or 0.0) > ((model.value or 0.0) if model.low is None else model.low):
            sentence = f"Not shown to be above its controls: {floor.text}, is too uncertain for that. {missing}"
            return Verdict("not shown", sentence.strip(), floor)
    if best is None or missing:
        sentence = f"Not shown to be above its controls. {missing or 'There is none.'}"
        return Verdict("not shown", sentence, best)
    named = f"{source_name(best.source).lower()}, {number_text(best.value)}"
    return Verdict("above control", f"The model is above its best control ({named}).", best)


def _is_uncertain_floor(score: Score) -> bool:
    is_floor = score.source in (REAL_SOURCE_FLOOR, REAL_SOURCE_CONTROL)
    return is_floor and (score.low is None or score.low <= CHANCE_AUC)


def _missing(known: Mapping[str, Score], measure: Measure) -> str:
    """Return sentences on the strict controls without a value, with the commands that compute them; empty if none."""
    how: defaultdict[str, list[str]] = defaultdict(list)
    for source, command in measure.strict_controls.items():
        if source not in known:
            how[command].append(source_name(source).lower())
    return " ".join(f"Missing: {', '.join(names)} (to get it: {command})." for command, names in how.items())


def run_verdict(run: RunPaths, measured: MeasuredScores) -> Verdict:
    """Return the verdict on a run's scores.

    Scores of an earlier attempt count as "no result". A trial, or a leaking official split, is at most "not shown".
    """
    if measured.notes:
        return Verdict("no result", "The results cannot be read.")
    verdict = judge(measured.scores, audit_failures(run), measured.measure)
    if "earlier attempt" in measured.earlier and verdict.standing != "no result":
        return Verdict("no result", f"The last attempt has no result. The numbers here are {measured.earlier}.")
    sentence, leaks = verdict.sentence, measured.measure.leaks
    if verdict.standing == "above control":
        if leaks:
            strict = command_text("--resume", path_to_text(run.root), "--fork", "-p", "protocol", "official_strict")
            leaks = f"Not shown to be above its controls. {leaks} Without what leaks: {strict}"
        if denied := trial_caution(run_parameters(run)) or leaks:
            return replace(verdict, standing="not shown", sentence=denied)
    sentence = sentence.replace("run_notebooks.py", command_text())
    if not is_ensemble(run.root):  # whose controls are added in each of its runs
        sentence = sentence.replace("--resume RUN", shlex.join(["--resume", path_to_text(run.root)]))
    return replace(verdict, sentence=sentence)


# --- The headline


def run_headline(run: RunPaths) -> ReportHeadline:
    """Return the headline of a run, from the files that it has written so far."""
    asked, status, measured = run_parameters(run), run_status(run), measured_scores(run)
    verdict, audit = run_verdict(run, measured), leakage_audit_of(run)
    peak = memory_peaks([run]).frame["peak_rss_bytes"].max()
    cautions = [f"The numbers are {measured.earlier}."] if measured.earlier not in verdict.sentence else []
    if verdict.best_control and verdict.standing == "not above control":
        advice = what_to_do(verdict.best_control, asked)
        if verdict.best_control.source == METADATA_ONLY and advice.startswith("To do"):  # the columns behind it
            cautions += audit.frame.filter(check="metadata_carriers")["finding"].to_list()
        cautions.append(advice)
    cautions += audit.frame.filter(check="size_and_rate")["finding"].to_list()
    cautions += floor_margin(measured.scores, measured.margin)
    cautions += [trial_caution(asked), *parameter_cautions(asked), fake_voices(run)]
    if model := measured.model_score:
        chance = measured.measure.chance
        if chance is not None and model.high is not None and model.high < chance:
            cautions.append(f"The whole interval lies below chance ({chance:g}): the model predicts the opposite here.")
        cautions += [*measured.cautions, *interval_cautions(model.value, model.low, model.high)]
    measured = replace(
        measured,
        cautions=tuple(dict.fromkeys(caution for caution in cautions if caution not in verdict.sentence)),
        notes=(*measured.notes, *audit.notes, *run_damage(run.root)),
    )
    number, seconds = status.get("peak_rss_bytes") if peak is None else peak, status.get("duration_seconds")
    return ReportHeadline(
        **vars(measured),
        run_id=path_to_text(run.run_id),
        experiment=path_to_text(run.experiment),
        state=as_text(status.get("state")),
        verdict=verdict,
        peak_rss_bytes=int(number) if isinstance(number, int | float) else None,
        duration_seconds=seconds if isinstance(seconds, int | float) else None,
        started_utc=as_text(status.get("started_utc")),
        model=ensemble_text(run) or model_name(asked),
        protocol=protocol_text(asked, recorded_corpora(run)),
        corpus=corpus_text(run),
        failure=failure(status),
    )  # fmt: skip


def floor_margin(scores: Sequence[Score], margin: Score | None = None) -> list[str]:
    """Return sentences on how well two sources of reals are told apart, and by how much the model's score exceeds that.

    ``margin`` is the score of the model minus that of the detector trained on the sources, with an interval from the
    same half-samples of groups. None: not recorded.
    """
    known = {score.source: score for score in scores if score.value is not None}
    model, sentences = known.get("model"), []
    for source, who in ((REAL_SOURCE_CONTROL, "The detector, trained on that,"), (REAL_SOURCE_FLOOR, "The model")):
        floor = known.get(source)
        if model is None or floor is None:
            continue
        shown = "is not shown to recognise" if _is_uncertain_floor(floor) else "recognises"
        over = Score("", (model.value or 0) - (floor.value or 0)) if source == REAL_SOURCE_FLOOR else margin
        text = interval_text(over.value, over.low, over.high) if over else "not recorded"
        sentences.append(f"{who} {shown} where a real comes from: {floor.text}. The model's margin over it is {text}.")
    return sentences


def what_to_do(control: Score, parameters: Mapping[str, object]) -> str:
    """Return advice for a model that is not above ``control``; empty if there is none.

    Remedies that the run's ``parameters`` already apply are left out. If the control itself is not shown to be above
    chance, the advice says that other videos would not help.
    """
    if control.source not in _MORE_REALS:
        return ""
    if control.low is not None and control.low <= CHANCE_AUC:
        return (
            f"{source_name(control.source)} is not shown to be above chance itself, so other or matched videos would "
            "not help: the model tells too little, or the videos are too few."
        )
    ways = [
        f"{way} (-p {name} {str(value).lower()})"
        for source, name, value, way in _REMEDIES
        if source == control.source and parameters.get(name) != value
    ]
    return f"To do about it: {'; or '.join([*ways, _MORE_REALS[control.source]])}."


# --- Many runs

NOT_ENDED = "not ended when this page was made"
_RUNS_SCHEMA = {
    "run_id": pl.String, "experiment": pl.String, "state": pl.String, "started_utc": pl.String, "model": pl.String,
    "corpus": pl.String, "differs": pl.String, "standing": pl.String, "verdict": pl.String, "measure": pl.String,
    "score": pl.Float64, "score_low": pl.Float64, "score_high": pl.Float64, "best_control": pl.String,
    "best_control_score": pl.Float64, "num_samples": pl.Int64, "num_groups": pl.Int64, "duration_seconds": pl.Float64,
    "peak_rss_bytes": pl.Int64,
}  # fmt: skip


def runs_table(runs_dir: Path) -> Answer:
    """Return one row (``_RUNS_SCHEMA``) for each run under ``runs_dir``, newest first; null means not recorded."""
    runs = list_runs(runs_dir)[::-1]
    headlines = [run_headline(run) for run in runs]
    rows = []
    # In a runner's kernel the page is read later, when the run has ended.
    states = {"running": NOT_ENDED} if os.environ.get(ATTEMPT_VARIABLE) else {}
    for headline, (_, _, differs) in zip(headlines, run_marks(runs), strict=True):
        score, best = headline.model_score or Score("", None), headline.verdict.best_control or Score("", None)
        row = {
            **vars(headline), "state": states.get(headline.state or "", headline.state), "differs": differs,
            "standing": headline.verdict.standing, "verdict": headline.verdict.sentence,
            "measure": headline.measure.name, "score": score.value, "score_low": score.low, "score_high": score.high,
            "best_control": best.source or None, "best_control_score": best.value,
        }  # fmt: skip
        rows.append({name: row[name] for name in _RUNS_SCHEMA})
    return Answer(pl.DataFrame(rows, schema=_RUNS_SCHEMA), tuple(note for each in headlines for note in each.notes))
