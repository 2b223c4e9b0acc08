"""The headline of a run: its main score, the scores of its controls, and whether the main score is above them.

A control is a simple predictor that a detector must beat, such as one that sees metadata alone. A floor is a special
control: the ROC AUC with which two sources of real videos can be told apart. If the floor is high, the detector may
recognise where videos come from instead of fakes.
"""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import polars as pl

from fvc_lib.analysis.read.queries import memory_peaks, results
from fvc_lib.analysis.read.runs import (
    TARGET_SCOPE,
    Answer,
    as_number,
    corpus_text,
    earlier_attempt,
    ensemble_text,
    failure,
    model_name,
    protocol_name,
    protocol_text,
    read_tables,
    run_parameters,
    run_status,
    run_task,
    trial_text,
)
from fvc_lib.analysis.wording import (
    clean_text,
    count_text,
    interval_text,
    metric_name,
    number_text,
    source_name,
    subject_name,
)
from fvc_lib.metrics.intervals import is_above_control
from fvc_lib.services.atomic_files import as_text, content_hash, path_to_text
from fvc_lib.services.code_versions import mixed_code
from fvc_lib.services.config import RESCALE_RATE
from fvc_lib.services.errors import command_text
from fvc_lib.services.records.digests import read_document, run_damage
from fvc_lib.services.run_paths import ATTEMPT_VARIABLE, RunPaths, is_ensemble, list_runs
from fvc_lib.services.tables import IMAGES, LEAKAGE_AUDIT, TASK_RESULTS
from fvc_lib.services.tasks import (
    DEFAULT_TASK,
    KFOLD,
    KFOLD_RESULTS,
    OFFICIAL,
    PROTOCOLS,
    TASKS,
)

HEADLINE_METRIC = "roc_auc"
CHANCE_AUC = 0.5
# Controls that leak: videos of one group lie on both sides of their split. They show how much that leak would add to a
# score, and no verdict compares the model with them.
DISHONEST_CONTROLS = frozenset({"group_lookup_by_row"})
METADATA_ONLY = "metadata_only"
LENGTH_ONLY, SHAPE_ONLY = "length_only", "shape_only"
REAL_SOURCE_FLOOR = "real_source_floor"  # the model's scores, measured on two sources of reals
REAL_SOURCE_CONTROL = "real_source_control"  # the same detector, trained to tell the two sources of reals apart
MARGIN = "margin_over_floor"
ACROSS_SOURCES = "across_sources"  # scope of scores by models that saw none of the video's source
BY_CASE = "by_case"  # scope in which each case, several videos of one event, counts once
WITHIN_PIXELS = "within_pixels"  # scope of the videos without the fakes that pixels cannot show
_MORE_REALS = (
    "To do about it: test on another corpus (-p protocol cross_corpus); or add reals from where the fakes come from."
)
# Advice for each control that the model is not above.
_REMEDIES = {
    METADATA_ONLY: (
        "To do about it: train and test on videos alike in codec, size and length (-p protocol metadata_matched); or "
        "measure re-encoded videos (-p canonical true) or rescaled ones (-p rescale ROWS, no more than the smallest "
        "video has); or add reals with the metadata of the fakes."
    ),
    LENGTH_ONLY: (
        "To do about it: train and test on videos of alike lengths (-p protocol length_matched); or add reals as long "
        "as the fakes."
    ),
    SHAPE_ONLY: (
        "To do about it: choose a model that sees the middle of each picture, such as the default; or add reals with "
        "the frame shapes of the fakes."
    ),
    REAL_SOURCE_FLOOR: _MORE_REALS,
    REAL_SOURCE_CONTROL: _MORE_REALS,
}
Standing = Literal["above control", "not above control", "not shown", "no result"]


@dataclass(frozen=True)
class Score:
    """The score of the model or of a control.

    Attributes:
        source: ``model`` or the name of a control.
        value: the score. None: undefined.
        low: lower end of the interval. None: not computed.
        high: upper end of the interval. None: not computed.
    """

    source: str
    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def text(self) -> str:
        """Text with name, value and interval of the score, such as ``metadata only, 0.612 [0.550, 0.671]``."""
        return f"{source_name(self.source).lower()}, {interval_text(self.value, self.low, self.high)}"


@dataclass(frozen=True)
class Measure:
    """The main metric of a run, with the facts that a reader needs to interpret its scores.

    Attributes:
        name: readable name of the metric.
        one: name of a sample in the singular, such as ``video``.
        chance: the score of guessing. None if it depends on the corpus.
        remark: a sentence on the limits of the score.
        is_split_in_folds: whether every sample was scored once, in the test part of its fold (cross-validation). If
            False, the corpus has one test part, and only its samples were scored.
        strict_controls: maps the name of a control to the command that computes it. All of these must have a value
            before the model can count as above its controls.
        leaks: a sentence on the leaks of the official split (the one that the corpus publishes). Empty: none, or the
            run used another split.
    """

    name: str
    one: str
    chance: float | None = None
    remark: str = ""
    is_split_in_folds: bool = False
    strict_controls: Mapping[str, str] = field(default_factory=dict)
    leaks: str = ""

    def circumstances(self, num_samples: int | None, num_groups: int | None) -> str:
        """Return sentences on how many samples were scored, and on whether training used other samples of their groups.

        Args:
            num_samples: number of scored samples. None: not recorded.
            num_groups: number of groups of these samples. None: not recorded.
        """
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
    remark="The score is visual-forensic: staged or out-of-context footage cannot be told by pixels. "
    "Audio is not judged: a video with a fake voice counts by what is seen.",
    is_split_in_folds=True,
    strict_controls=TASKS[DEFAULT_TASK].strict_controls[""],
)


@dataclass(frozen=True)
class MeasuredScores:
    """The scores of the model and its controls in one metric.

    Attributes:
        measure: the metric, with facts on how it was measured.
        scores: the scores, that of the model first.
        num_samples: number of samples that were scored. None: not recorded.
        num_groups: number of groups of the samples. None: not recorded.
        notes: sentences on files that cannot be read.
        cautions: sentences on the limits of the scores.
        earlier: text on the attempt that made the scores, if they may be outdated (``runs.earlier_attempt``). Empty
            otherwise.
        margin: score of the model minus the score of the same detector when trained to tell two sources of reals
            apart. None: not computed.
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
        """The score of the model. None if there is none."""
        return next((score for score in self.scores if score.source == "model" and score.value is not None), None)


@dataclass(frozen=True)
class Verdict:
    """Whether the model is above its controls, the simple predictors that it must beat.

    Attributes:
        standing: the verdict as a fixed term, such as "above control".
        sentence: the verdict and its reason as a sentence.
        best_control: the control that decided the verdict, else the one with the highest score. None: there is none.
    """

    standing: Standing
    sentence: str
    best_control: Score | None = None


@dataclass(frozen=True, kw_only=True)
class ReportHeadline(MeasuredScores):
    """The head of a run's report: the scores, the verdict and facts about the run.

    A fact that is None was not recorded.
    """

    run_id: str
    experiment: str
    state: str | None
    verdict: Verdict
    peak_rss_bytes: float | None
    duration_seconds: float | None
    started_utc: str | None
    model: str | None
    protocol: str  # empty for the protocol ``kfold``
    corpus: str | None
    failure: str | None

    @property
    def sentences(self) -> tuple[str, ...]:
        """The sentence of the verdict, then the cautions (sentences on the limits of the scores)."""
        return (self.verdict.sentence, *self.cautions)


# --- Scores on record


def overall_scores(results_frame: pl.DataFrame, metric: str = HEADLINE_METRIC) -> tuple[Score, ...]:
    """Return scores over all folds: first the score of the model, then those of its controls in descending order.

    Controls on a split that leaks (``DISHONEST_CONTROLS``) come last. ``results_frame`` holds rows of
    ``tables.RESULTS``, and ``metric`` is a name in its column ``metric``.
    """
    rows = results_frame.filter(scope="all", metric=metric)
    leaks = pl.col("source").is_in(list(DISHONEST_CONTROLS))
    rows = rows.sort(pl.col("source") != "model", leaks, -pl.col("value"), "source", nulls_last=True)
    return tuple(Score(*row) for row in rows.select("source", "value", "low", "high").iter_rows())


def every_task_score(results: pl.DataFrame, task: str) -> Iterator[MeasuredScores]:
    """Yield the main scores of a run without folds, each with the scores of its controls.

    A run can have several main scores, such as one for each number that an image model predicts. Each yielded object
    holds one score of the model, then the scores of the controls, the highest first.

    Args:
        results: rows of ``tables.TASK_RESULTS``.
        task: name of the task, ``image`` or ``video_text``.
    """
    for begins, metric_begins, one in TASKS[task].headline:
        fitting = pl.col("subject").str.starts_with(begins) & pl.col("metric").str.starts_with(metric_begins)
        models = results.filter(fitting, source="model").unique("subject", keep="first", maintain_order=True)
        for model in models.rows(named=True):
            subject, metric = model["subject"], model["metric"]
            rows = results.filter(subject=subject, metric=metric)
            rows = rows.sort(pl.col("source") != "model", -pl.col("value"), "source", nulls_last=True)
            exact = (pl.col("source") == "chance") & pl.col("low").is_null()  # computed, not estimated
            ends = [pl.when(exact).then("value").otherwise(end).alias(end) for end in ("low", "high")]
            name = metric_name(metric) if subject == "all" else f"{metric_name(metric)}, {subject_name(subject)}"
            measure = Measure(name, one, strict_controls=TASKS[task].strict_controls.get(begins, {}))
            scores = tuple(Score(*row) for row in rows.select("source", "value", *ends).iter_rows())
            yield MeasuredScores(measure, scores, model["num_samples"], model["num_groups"])


def task_scores(results: pl.DataFrame, task: str) -> MeasuredScores:
    """Return the first main score of a run without folds, with the scores of its controls.

    If the model has no score, the field ``scores`` of the result is empty. ``results`` are rows of
    ``tables.TASK_RESULTS``, and ``task`` is ``image`` or ``video_text``.
    """
    return next(every_task_score(results, task), MeasuredScores(Measure(*TASKS[task].no_headline)))


def measured_scores(run: RunPaths) -> MeasuredScores:
    """Return the main score of a run and the scores of its controls, read from the run's folder.

    If no scores are recorded yet, ``scores`` is empty.
    """
    parameters = run_parameters(run)
    task = run_task(parameters)
    if TASKS[task].headline:
        table, answer = run.task_results, read_tables([(path_to_text(run.run_id), run.task_results)], TASK_RESULTS)
        measured = task_scores(answer.frame, task)
        cautions = tuple(untested_classes(run))
    else:
        table = run.results
        answer = results([run])
        measured = _scores_over_folds(run, answer.frame)
        cautions = (
            *scope_cautions(answer.frame),
            *protocol_cautions(parameters, answer.frame, HEADLINE_METRIC),
        )
    if not measured.scores:
        return replace(measured, notes=answer.notes)
    return replace(measured, notes=answer.notes, cautions=cautions, earlier=earlier_attempt(run, table))


def _scores_over_folds(run: RunPaths, frame: pl.DataFrame) -> MeasuredScores:
    parameters, scores = run_parameters(run), overall_scores(frame)
    # A fork reuses the checkpoints of a run without the control of two sources; otherwise the folds train again.
    is_fork = parameters.get("real_source_control") is False
    way = "--resume RUN --fork -p real_source_control true" if is_fork else "--force 04 --resume RUN"
    of_sources = [score.source for score in scores if score.source == REAL_SOURCE_CONTROL]  # none without two sources
    strict = {**FORGERIES.strict_controls, **dict.fromkeys(of_sources, f"run_notebooks.py {way}")}
    measure = replace(FORGERIES, leaks=official_leaks(parameters, leakage_audit_of(run).frame), strict_controls=strict)
    model = frame.filter(scope="all", source="model").select("num_videos", "num_groups").head(1).rows()
    num_videos, num_groups = model[0] if model else (None, None)
    margin = next(iter(overall_scores(frame, MARGIN)), None)
    return MeasuredScores(measure, scores, num_videos, num_groups, margin=margin)


# --- Cautions: sentences that limit what a score shows, because of its data, its intervals or its leaks

_MOST_NAMED = 12  # classes or targets in a sentence
_OFFICIAL_LEAKS = "official_split_leaks"  # name of a check in tables.LEAKAGE_AUDIT


def run_cautions(run: RunPaths) -> tuple[str, ...]:
    """Return warnings that should stand next to any number of a run, the most serious first, as sentences.

    For example, the run is a trial (it used part of its corpus), files are damaged, a leakage check failed, the folds
    were trained by different code, or labels were shuffled. The verdict against the controls is not included.
    ``run_headline`` returns it.
    """
    parameters = run_parameters(run)
    audit = [f"The leakage audit did not pass: {clean_text(finding)}" for finding in audit_failures(run)]
    leaks = official_leaks(parameters, leakage_audit_of(run).frame)
    found = (trial_caution(parameters), *run_damage(run.root), *audit, leaks, *training_cautions(run))
    return tuple(dict.fromkeys(filter(None, (*found, *parameter_cautions(parameters)))))


def training_cautions(run: RunPaths) -> list[str]:
    """Return a warning for each mismatch between the training of a run and its results or parameters.

    Three mismatches are found:

    - A table was written again after the results were computed from it.
    - The network was defined in a cell of a notebook. It is not the model that the parameters name.
    - The folds were trained by different versions of the code.
    """
    read = (read_document(run.stage_checkpoint(KFOLD_RESULTS)).get("fingerprint") or {}).get("inputs", {})
    newer = [name for name, was in read.items() if (file := run.root / name).is_file() and content_hash(file) != was]
    again = command_text("--resume", path_to_text(run.root))
    trained = {read_document(path).get("network", [""])[0] for path in run.root.glob("checkpoints/fold_*/loop.json")}
    own = [name.removeprefix("__main__.") for name in sorted(trained) if name.startswith("__main__.")]
    mixed = mixed_code(sorted(run.root.glob("checkpoints/fold_*")))
    cautions = {
        f"Written again since these results: {', '.join(newer)}. Go on: {again}": newer,
        f"Trained was {', '.join(own)} of a notebook's cell, not the model that the parameters name.": own,
        f"The folds were trained by different code: {mixed}.": mixed,
    }
    return [sentence for sentence, holds in cautions.items() if holds]


def parameter_cautions(parameters: Mapping[str, object]) -> list[str]:
    """Return one sentence for each parameter of a run that limits what its scores show.

    Such parameters are a synthetic corpus, shuffled labels, re-encoding and rescaling.
    """
    synthetic = "The corpus is synthetic: its numbers show that the pipeline works, not how well"
    given = parameters.get
    if given("more_corpora"):
        synthetic = "Part of the videos is the synthetic sample corpus, which shows nothing of how well"
    rows = given("rescale")
    cautions = {
        f"{synthetic} {TASKS[run_task(parameters)].synthetic}.": given("corpus") == "",
        "Labels were shuffled by group on purpose: anything but chance would be a leak.": given("shuffle_labels"),
        "Every video was re-encoded by one recipe before it was decoded or measured.": given("canonical"),
        f"Every video was brought to {rows} rows and {RESCALE_RATE} frames a second before decoding.": rows,
    }
    return [sentence for sentence, holds in cautions.items() if holds]


def trial_caution(parameters: Mapping[str, object]) -> str:
    """Return a sentence that says that a run is a trial (on part of its corpus). For other runs the text is empty."""
    trial = trial_text(parameters)
    return f"This is a {trial}: it claims nothing of the corpus." if trial else ""


def interval_cautions(value: float | None, low: float | None, high: float | None) -> tuple[str, ...]:
    """Return one sentence on an interval that must not be taken literally, else an empty tuple.

    There are two such cases: the interval has no width, or ``value`` is one of its ends. In the second case the
    sentence says that no mistake was seen, and that the interval is a one-sided bound.

    Args:
        value: a score. None: undefined.
        low: lower end of its interval. None: there is no interval.
        high: upper end of its interval. None: there is no interval.
    """
    text = "An interval without width is no certainty: no draw of these groups changes the number, others may."
    if low != high:
        text = "No mistake was seen, so the interval is a one-sided bound: it follows from the number of groups."
    is_odd = low is not None and (low == high or value in (low, high))
    return (text,) if is_odd else ()


def untested_classes(run: RunPaths) -> list[str]:
    """Return a list with one sentence, which names the classes without a test image.

    The list is empty if every class has a test image.
    """
    images = read_tables([(path_to_text(run.run_id), run.images)], IMAGES).frame.drop_nulls("class_label")
    tested = set(images.filter(part="test")["class_label"])
    untested = sorted(set(images["class_label"]) - tested)
    if not untested:
        return []
    named = _some_of([clean_text(name) for name in untested])
    number = f"{len(untested)} of {len(untested) + len(tested)} classes were never tested ({named})"
    return [f"{number}: the number is of the others, and no overall figure is meant."]


def _some_of(names: Sequence[str]) -> str:
    more = ["..."] if len(names) > _MOST_NAMED else []
    return ", ".join([*names[:_MOST_NAMED], *more])


# --- Protocols (rules that split videos into training and test): scores at targets, and leaks of an official split


def protocol_cautions(parameters: Mapping[str, object], results: pl.DataFrame, metric: str) -> tuple[str, ...]:
    """Return one sentence that explains the protocol of a run and gives the score on each target.

    A protocol is the rule that splits videos into training and test. A target is a corpus or generator that is only
    tested on.

    For the default protocol ``kfold`` the tuple is usually empty. There is one exception: the user named several
    corpora or sources of videos, but no score on unseen sources was computed. The sentence then says so and names the
    remedy.

    Args:
        parameters: parameters of the run.
        results: rows of ``tables.RESULTS``.
        metric: name of the metric, such as ``roc_auc``.
    """
    name, mean = protocol_name(parameters), ""
    if name == KFOLD:
        names_sources = parameters.get("source_column", "corpus") != "corpus" or parameters.get("more_corpora")
        if not names_sources or results["scope"].eq(ACROSS_SOURCES).any():
            return ()
        remedy = command_text("--resume", "RUN", "--fork", "-p", "protocol", "leave_one_source_out")
        return (f"No score across sources was computed, so nothing is shown for new sources. To get one: {remedy}.",)
    rows = results.filter(pl.col("scope").str.starts_with(TARGET_SCOPE), source="model", metric=metric)
    targets = [
        f"{clean_text(scope.removeprefix(TARGET_SCOPE))} {number_text(value)}"
        for scope, value in rows.sort("value", "scope", nulls_last=True).select("scope", "value").rows()
    ]
    if targets:
        counted = count_text(len(targets), "target")
        mean = f" The number is the plain mean over {counted}, the worst first: {_some_of(targets)}."
    return (f"Protocol {protocol_text(parameters)}: {PROTOCOLS[name].meaning}.{mean}",)


# Sentences on the scores of a scope, by its name. A score is across sources if no network was trained on videos of the
# source that it was tested on. A case is several videos of one event.
_OF_SCOPES = {
    ACROSS_SOURCES: "Across sources, tested by models that saw none of the video's source: {scores}. This is the score "
    "to expect on videos of new sources. Within the corpus: {within}. This holds for further videos of the same "
    "sources.",
    WITHIN_PIXELS: "Without the fakes that pixels cannot show (staged, out of context, miscaptioned): {scores}.",
    BY_CASE: "By case, with one score for all videos of an event: {scores} ({number:,} cases).",
}


def scope_cautions(results: pl.DataFrame) -> tuple[str, ...]:
    """Return sentences that state the scores of the model and of metadata alone in special selections of the videos.

    Such a selection is a scope in ``_OF_SCOPES``. For example, in ``across_sources`` every video is scored by a model
    that saw no video of its source. A scope without scores gives no sentence. ``results`` holds rows of
    ``tables.RESULTS``.
    """
    sentences = []
    for scope, sentence in _OF_SCOPES.items():
        if scores := _with_metadata(results, scope):
            number = results.filter(scope=scope)["num_videos"][0]
            within = _with_metadata(results, "all")
            sentences.append(sentence.format(scores=scores, within=within, number=number))
    return tuple(sentences)


def _with_metadata(results: pl.DataFrame, scope: str) -> str:
    """Return text with the scores of the model and of the control that sees metadata alone.

    The text is empty if one of the two is missing. ``scope`` is a value of the column ``scope`` of ``results``, which
    says which videos a result is about.
    """
    rows = results.filter(scope=scope, metric=HEADLINE_METRIC)
    scores = {row[0]: Score(*row) for row in rows.select("source", "value", "low", "high").iter_rows()}
    texts = [scores[name].text for name in ("model", METADATA_ONLY) if name in scores]
    return "; ".join(texts) if len(texts) > 1 else ""


def official_leaks(parameters: Mapping[str, object], audit: pl.DataFrame) -> str:
    """Return a sentence on the leaks of the official split (the one that the corpus publishes).

    Empty if the run uses another protocol or nothing leaks. ``audit`` holds rows of ``tables.LEAKAGE_AUDIT``, and
    ``parameters`` are those of the run.
    """
    if protocol_name(parameters) != OFFICIAL:
        return ""
    rows = audit.filter(check=_OFFICIAL_LEAKS).select("count", "finding").rows()
    if not rows:
        return "What the official split leaks is not recorded."
    return str(rows[0][1]) if rows[0][0] else ""


# --- The leakage audit


def leakage_audit_of(run: RunPaths) -> Answer:
    """Return the leakage checks of a run as a table, one row per check.

    A check looks for a leak, such as a group in training and test. The columns are ``run_id`` and those of
    ``tables.LEAKAGE_AUDIT``. The table is empty if the run has no checks.
    """
    return read_tables([(path_to_text(run.run_id), run.leakage_audit)], LEAKAGE_AUDIT)


def audit_failures(run: RunPaths) -> list[str]:
    """Return a sentence for each leakage check that failed. If the audit cannot be read, the reason comes first."""
    audit = leakage_audit_of(run)
    return [*audit.notes, *audit.frame.filter(~pl.col("passed").fill_null(value=True))["finding"]]


def audit_facts(run: RunPaths) -> tuple[tuple[str, str], ...]:
    """Return the number of passed leakage checks as one fact for a report, a pair ``(name, text)``.

    The tuple is empty if there are no checks.
    """
    passed = leakage_audit_of(run).frame["passed"].drop_nulls()
    if passed.is_empty():
        return ()
    return (("Leakage audit", f"{passed.sum()} of {count_text(passed.len(), 'check')} passed"),)


# --- The verdict against the controls


def judge(scores: Sequence[Score], leaks: Sequence[str] = (), measure: Measure = FORGERIES) -> Verdict:
    """Return the verdict: whether the model is above every control, except those on a split that leaks.

    ``metrics.intervals.is_above_control`` compares the model with each control. The standing "above control" also needs
    a value for each strict control of ``measure``. If the network is above chance on shuffled labels, it has probably
    seen its test data. Then the model counts as not above its controls.

    Args:
        scores: the scores of the model and its controls.
        leaks: findings of failed leakage checks. If there are any, the model counts as not above its controls.
        measure: the metric of the scores, with the controls that must have a value.
    """
    known = {score.source: score for score in scores if score.value is not None}
    model = known.pop("model", None)
    if model is None:
        return Verdict("no result", "No result is recorded.")
    missing = _missing(known, measure)
    honest = [control for source, control in known.items() if source not in DISHONEST_CONTROLS]
    # A floor that is not shown to be above chance does not count as a control. But if it exceeds the lower end of the
    # model's interval, the verdict is "not shown".
    unsure = [control for control in honest if _is_uncertain_floor(control)]
    controls = [control for control in honest if control not in unsure]
    best = max(controls, key=lambda score: (score.value or 0.0, score.high or 0.0), default=None)
    # Reasons why the model does not count as above its controls, the weightiest first.
    reasons = [
        Verdict("not above control", f"The leakage audit did not pass, so no number counts: {leak}", best)
        for leak in leaks
    ]
    reasons += [
        Verdict(
            "not above control",
            f"Something leaks, or chance lifts 2 to 5 in 100 runs so far: {shuffled.text}, is above chance.",
            shuffled,
        )
        for source, shuffled in known.items()
        if source == "shuffled_labels" and (shuffled.low or 0.0) > CHANCE_AUC
    ]
    in_reach = [
        control for control in controls if not is_above_control(model.value, model.low, control.value, control.high)
    ]
    # A control with a lower value may have the wider interval.
    in_reach.sort(key=lambda score: (score == best, score.high or score.value), reverse=True)
    reasons += [
        Verdict("not above control", f"The model is not above its control ({control.text}). {missing}".strip(), control)
        for control in in_reach
    ]
    lowest = model.value if model.low is None else model.low
    reasons += [
        Verdict(
            "not shown",
            f"Not shown to be above its controls: {floor.text}, is too uncertain for that. {missing}".strip(),
            floor,
        )
        for floor in unsure
        if (floor.value or 0.0) > (lowest or 0.0)
    ]
    if reasons:
        return reasons[0]
    if best is None or missing:
        return Verdict("not shown", f"Not shown to be above its controls. {missing or 'There is none.'}", best)
    named = f"{source_name(best.source).lower()}, {number_text(best.value)}"
    return Verdict("above control", f"The model is above its best control ({named}).", best)


def _is_uncertain_floor(score: Score) -> bool:
    is_floor = score.source in (REAL_SOURCE_FLOOR, REAL_SOURCE_CONTROL)
    return is_floor and (score.low is None or score.low <= CHANCE_AUC)


def _missing(known: Mapping[str, Score], measure: Measure) -> str:
    """Return a sentence that names the controls that have no score but need one, and the commands that compute them.

    These are the ``strict_controls`` of ``measure`` that are not in ``known``. Without missing controls the text is
    empty. ``known`` maps the name of a control to its score.
    """
    missing = {source: command for source, command in measure.strict_controls.items() if source not in known}
    names = ", ".join(source_name(source).lower() for source in missing)
    commands = "; ".join(dict.fromkeys(missing.values()))
    return f"Missing: {names} (to get it: {commands})." if missing else ""


def run_verdict(run: RunPaths, measured: MeasuredScores) -> Verdict:
    """Return whether the model of ``run`` is above its controls, given its scores ``measured``.

    If the scores cannot be read or are of an earlier attempt, the standing is "no result". For a trial (a run on part
    of its corpus) and for an official split that leaks, "above control" becomes "not shown".
    """
    if measured.notes:
        return Verdict("no result", "The results cannot be read.")
    verdict = judge(measured.scores, audit_failures(run), measured.measure)
    if "earlier attempt" in measured.earlier and verdict.standing != "no result":
        return Verdict("no result", f"The last attempt has no result. The numbers here are {measured.earlier}.")
    sentence, leaks = verdict.sentence, measured.measure.leaks
    if verdict.standing == "above control":
        strict = command_text("--resume", path_to_text(run.root), "--fork", "-p", "protocol", "official_strict")
        leaks = leaks and f"Not shown to be above its controls. {leaks} Without what leaks: {strict}"
        if denied := trial_caution(run_parameters(run)) or leaks:
            return replace(verdict, standing="not shown", sentence=denied)
    sentence = sentence.replace("run_notebooks.py", command_text())
    if not is_ensemble(run.root):  # missing controls of an ensemble are computed in its member runs
        sentence = sentence.replace("--resume RUN", shlex.join(["--resume", path_to_text(run.root)]))
    return replace(verdict, sentence=sentence)


# --- The headline


def run_headline(run: RunPaths, *, with_memory: bool = True) -> ReportHeadline:
    """Return the headline of a run: main score, verdict against the controls, cautions and facts.

    It is read from the files that the run has written so far.

    Args:
        run: the run.
        with_memory: whether to compute the peak memory from the memory log, which is long after a long training. If
            False, the peak comes from the run's status file.
    """
    parameters = run_parameters(run)
    status = run_status(run)
    measured = measured_scores(run)
    verdict = run_verdict(run, measured)
    audit = leakage_audit_of(run)
    cautions = [f"The numbers are {measured.earlier}."] if measured.earlier not in verdict.sentence else []
    cautions += measured.cautions
    control = verdict.best_control
    if control and verdict.standing == "not above control":
        if control.source == METADATA_ONLY:  # name the columns that carry the label
            cautions += audit.frame.filter(check="metadata_carriers")["finding"].to_list()
        cautions.append(what_to_do(control))
    cautions += audit.frame.filter(check="size_and_rate")["finding"].to_list()
    cautions += floor_margin(measured.scores, measured.margin)
    cautions += [trial_caution(parameters), *training_cautions(run), *parameter_cautions(parameters)]
    if model := measured.model_score:
        chance = measured.measure.chance
        if chance is not None and model.high is not None and model.high < chance:
            cautions.append(f"The whole interval lies below chance ({chance:g}): the model predicts the opposite here.")
        cautions += interval_cautions(model.value, model.low, model.high)
    further = dict.fromkeys(caution for caution in cautions if caution not in verdict.sentence)
    scores = replace(
        measured,
        cautions=tuple(further),
        notes=(*measured.notes, *audit.notes, *run_damage(run.root)),
    )
    peak = memory_peaks([run]).frame["peak_rss_bytes"].max() if with_memory else None
    peak_rss_bytes = as_number(status.get("peak_rss_bytes") if peak is None else peak)
    state = "stopped" if status.get("state") == "requeue" else as_text(status.get("state"))
    return ReportHeadline(
        **vars(scores),
        run_id=path_to_text(run.run_id),
        experiment=path_to_text(run.experiment),
        state=state,
        verdict=verdict,
        peak_rss_bytes=peak_rss_bytes,
        duration_seconds=as_number(status.get("duration_seconds")),
        started_utc=as_text(status.get("started_utc")),
        model=ensemble_text(run) or model_name(parameters),
        protocol=protocol_text(parameters),
        corpus=corpus_text(run),
        failure=failure(status),
    )


def worth_of(run: RunPaths, headline: ReportHeadline, results: pl.DataFrame, task: str) -> tuple[str, ...]:
    """Return sentences on how far the results of a run without folds can be trusted.

    They are the run's verdict, its cautions, and each main score of its task with the scores of the controls. The
    verdict says whether the model is above its controls, the simple predictors that it must beat.

    Args:
        run: the run.
        headline: its headline.
        results: its TASK_RESULTS table.
        task: its task.
    """
    sentences = list(headline.sentences)
    for measured in every_task_score(results, task):
        scores = "; ".join(score.text for score in measured.scores)
        samples = count_text(measured.num_samples or 0, measured.measure.one)
        sentences.append(f"{measured.measure.name} on {samples} of the test part: {scores}.")
        sentences.append(run_verdict(run, measured).sentence)
    return tuple(dict.fromkeys(sentences))


def floor_margin(scores: Sequence[Score], margin: Score | None = None) -> list[str]:
    """Return sentences on how well two sources of reals can be told apart, and how far the model is above that.

    Two floors are reported, if they were computed: how well the scores of the model tell the sources apart, and how
    well the same detector does when it is trained to do so. A model with a high floor may recognise where videos come
    from instead of fakes.

    Args:
        scores: the scores of the model and its controls.
        margin: score of the model minus that of the detector trained to tell the sources apart, with an interval from
            half-samples (random halves of the groups). None: not recorded.
    """
    shown = {True: "is not shown to recognise", False: "recognises"}
    subjects = ((REAL_SOURCE_CONTROL, "The detector, trained on that,"), (REAL_SOURCE_FLOOR, "The model"))
    sentences = [
        f"{who} {shown[_is_uncertain_floor(floor)]} where a real comes from: {floor.text}."
        for source, who in subjects
        for floor in scores
        if floor.source == source and floor.value is not None
    ]
    if margin:
        number = interval_text(margin.value, margin.low, margin.high)
        sentences.append(f"The model's margin over the detector trained on that is {number}.")
    return sentences


def what_to_do(control: Score) -> str:
    """Return advice on data and parameters for a model that is not above ``control``. Empty if there is no advice.

    Usually the advice is to use videos on which the control does worse. A control whose interval reaches down to chance
    is not shown to be better than guessing. The advice then says that other videos would not help.
    """
    if control.source in _REMEDIES and control.low is not None and control.low <= CHANCE_AUC:
        return (
            f"{source_name(control.source)} is not shown to be above chance itself, so other or matched videos would "
            "not help. Give more groups, whose number the intervals depend on, or another model."
        )
    return _REMEDIES.get(control.source, "")


# --- Many runs

NOT_ENDED = "not ended when this page was made"


def runs_table(runs_dir: Path) -> Answer:
    """Return one row for each run under ``runs_dir``, newest first. Null means not recorded.

    Columns: ``run_id experiment state model standing verdict measure score score_low score_high num_samples``.
    ``standing`` says in a few words whether the model is above its controls, and ``verdict`` in a sentence. ``measure``
    is the name of the metric, and ``score`` is the model's value in it.
    """
    rows, notes = [], list[str]()
    for run in list_runs(runs_dir)[::-1]:
        headline = run_headline(run)
        score = headline.model_score or Score("", None)
        verdict = headline.verdict
        state = headline.state
        if state == "running" and os.environ.get(ATTEMPT_VARIABLE):  # readers see this page after the run
            state = NOT_ENDED
        row = {name: getattr(headline, name) for name in ("run_id", "experiment", "model", "num_samples")}
        row |= {"state": state, "standing": verdict.standing, "verdict": verdict.sentence}
        row |= {"measure": headline.measure.name, "score": score.value}
        rows.append(row | {"score_low": score.low, "score_high": score.high})
        notes += headline.notes
    return Answer(pl.DataFrame(rows, infer_schema_length=None), tuple(notes))
