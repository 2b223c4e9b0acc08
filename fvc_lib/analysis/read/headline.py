"""The headline of a run: its number, its controls, and whether it is above them."""

import shlex
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
    parameter_cautions,
    trial_caution,
    untested_classes,
    weaker_than_one_answer,
)
from fvc_lib.analysis.read.naming import (
    corpus_text,
    ensemble_text,
    model_name,
    recorded_corpora,
    run_marks,
    run_parameters,
    run_task,
)
from fvc_lib.analysis.read.protocols import (
    official_leaks,
    protocol_cautions,
    protocol_name,
    protocol_text,
    strict_command,
)
from fvc_lib.analysis.read.queries import memory_peaks, results
from fvc_lib.analysis.read.records import (
    Answer,
    as_number,
    earlier_attempt,
    failure,
    read_tables,
    run_status,
    shown_state,
    started_from_name,
)
from fvc_lib.analysis.wording import (
    count_text,
    interval_text,
    metric_name,
    number_text,
    source_name,
    subject_name,
)  # fmt: skip
from fvc_lib.metrics.paired_difference import is_above_control
from fvc_lib.services.atomic_files import as_text, path_to_text
from fvc_lib.services.errors import command_text
from fvc_lib.services.records.digests import run_damage
from fvc_lib.services.records.ensembles import is_ensemble
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tables import TASK_RESULTS
from fvc_lib.services.tasks import CROSS_CORPUS, DEFAULT_TASK, KFOLD, LENGTH_MATCHED, METADATA_MATCHED, TASKS

# --- The main measure of each task, and its scores on record

EXACT_CONTROLS = frozenset({"chance"})  # computed, not estimated: such a control is its own interval


@dataclass(frozen=True)
class Score:
    """One source's value of the measure, with its interval where one was computed."""

    source: str
    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Measure:
    """The measure of a headline's scores.

    Attributes:
        name: of the measure.
        one: the judged thing in the singular, such as ``video``.
        chance: the score of guessing, if every corpus has the same.
        remark: a sentence on the limits of the number.
        is_split_in_folds: whether folds cover all samples; else only a test part was judged.
        strict_controls: controls that a claim needs, each with the command that adds it (``TaskSpec.strict_controls``).
        is_of_classes: whether the score covers all classes together.
        leaks: a sentence on the leaks of the official split that the run used; else empty.
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
        """Return sentences on the number of samples and groups, and on what the model had seen."""
        if num_samples is None or num_groups is None:
            return f"How many {self.one}s were judged is not recorded."
        samples, groups = count_text(num_samples, self.one), count_text(num_groups, "group")
        if self.leaks:
            return f"Each of {samples}, in {groups}, was judged once. {self.leaks} {self.remark}".strip()
        was, their = ("was", "its") if num_samples == 1 else ("were", "their")
        judged = (
            f"Each of {samples} was judged once, by a model that had seen no {self.one} of its group ({groups})."
            if self.is_split_in_folds
            else f"{samples} of the test part, in {groups}, {was} judged once, by a model that had seen none of "
            f"{their} group{'s' * (num_groups != 1)}."
        )
        return f"{judged} {self.remark}".strip()


FORGERIES = Measure(
    "ROC AUC",
    "video",
    chance=0.5,
    remark="The score is visual-forensic: staged or out-of-context footage cannot be told by pixels.",
    is_split_in_folds=True,
    strict_controls=TASKS[DEFAULT_TASK].strict_controls[""],
)


@dataclass(frozen=True)
class MeasuredScores:
    """The scores of one measure, the model's first.

    Attributes:
        measure: that the scores are of.
        scores: of the model and its controls.
        num_samples: that were judged.
        num_groups: of the samples.
        notes: on files that cannot be read.
        cautions: on the scores.
        earlier: the earlier attempt that made the scores; empty if the last one did.
        margin: of the model over the trained floor.
    """

    measure: Measure
    scores: tuple[Score, ...] = ()
    num_samples: int | None = None
    num_groups: int | None = None
    notes: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    earlier: str = ""
    margin: Score | None = None


def task_scores(results: pl.DataFrame, task: str) -> MeasuredScores:
    """Return the main score of a run without folds (TASK_RESULTS), and its controls from best to worst."""
    for subject, metric, one in TASKS[task].headline:
        begins = pl.col("subject").str.starts_with(subject) & pl.col("metric").str.starts_with(metric)
        rows = results.filter(begins)
        if rows.filter(pl.col("source") == "model").height:
            return _of_one(rows, one, TASKS[task].strict_controls.get(subject, {}))
    return MeasuredScores(Measure(*TASKS[task].no_headline))


def _of_one(rows: pl.DataFrame, one: str, strict_controls: Mapping[str, str]) -> MeasuredScores:
    subject, metric = rows.filter(pl.col("source") == "model").select("subject", "metric").row(0)
    rows = rows.filter(pl.col("subject") == subject, pl.col("metric") == metric)
    rows = rows.sort(pl.col("source") != "model", -pl.col("value"), "source", nulls_last=True)
    model = rows.row(0, named=True)
    scores = tuple(_score(*row) for row in rows.select("source", "value", "low", "high").iter_rows())
    named = metric_name(metric)
    name = named if subject == "all" else f"{named}, {subject_name(subject)}"
    measure = Measure(name, one, strict_controls=strict_controls, is_of_classes=subject == "all")
    return MeasuredScores(measure, scores, model["num_samples"], model["num_groups"])


def _score(source: str, value: float | None, low: float | None, high: float | None) -> Score:
    exact = source in EXACT_CONTROLS and low is None and high is None
    return Score(source, value, value, value) if exact else Score(source, value, low, high)


# --- The verdict against the controls

HEADLINE_METRIC = "roc_auc"
# The score of a split by rows, shown to make that leak visible; no verdict compares with it.
DISHONEST_CONTROLS = frozenset({"group_lookup_by_row"})

SHUFFLED_LABELS = "shuffled_labels"
METADATA_ONLY = "metadata_only"
LENGTH_ONLY = "length_only"
REAL_SOURCE_FLOOR = "real_source_floor"  # of the model's own scores
REAL_SOURCE_CONTROL = "real_source_control"  # of the same detector trained on the sources
_FLOORS = (REAL_SOURCE_FLOOR, REAL_SOURCE_CONTROL)
MARGIN = "margin_over_floor"
# A fork reuses the checkpoints of a run without this control; otherwise the folds train again.
_HOW_TO_TRAIN_ON_SOURCES = {
    True: "run_notebooks.py --resume RUN --fork -p real_source_control true",
    False: "run_notebooks.py --force 04 --resume RUN",
}
METADATA_CARRIERS = "metadata_carriers"  # a check of the leakage audit: the columns that predict the labels
SIZE_AND_RATE = "size_and_rate"  # likewise: these alone predict them, with advice
CHANCE_AUC = 0.5

Standing = Literal["above control", "not above control", "not shown", "no result"]


@dataclass(frozen=True)
class Verdict:
    """The model's standing against its best honest control, with a sentence."""

    standing: Standing
    sentence: str
    best_control: Score | None = None


@dataclass(frozen=True)
class ReportHeadline:
    """The head of a report; pages show ``None`` as "not recorded".

    ``scores`` are of ``measure``. ``more_facts`` are further facts as pairs of name and text.
    """

    run_id: str
    experiment: str
    state: str | None
    verdict: Verdict
    measure: Measure = FORGERIES
    scores: tuple[Score, ...] = ()
    num_samples: int | None = None
    num_groups: int | None = None
    peak_rss_bytes: int | None = None
    duration_seconds: float | None = None
    started_utc: str | None = None
    model: str | None = None
    protocol: str = ""  # empty for folds
    corpus: str | None = None
    failure: str | None = None
    cautions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # on damaged and unreadable files
    earlier: str = ""  # the earlier attempt that made the numbers; empty if the last one did
    more_facts: tuple[tuple[str, str], ...] = ()

    @property
    def model_score(self) -> Score | None:
        """Return the model's own score; None if there is none."""
        return next((score for score in self.scores if score.source == "model" and score.value is not None), None)

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return the verdict and the cautions."""
        return (self.verdict.sentence, *self.cautions)


def overall_scores(results_frame: pl.DataFrame, metric: str = HEADLINE_METRIC) -> tuple[Score, ...]:
    """Return the scores over all folds: the model, its controls from best to worst, then the dishonest ones."""
    rows = results_frame.filter((pl.col("scope") == "all") & (pl.col("metric") == metric))
    aside = pl.col("source").is_in(sorted(DISHONEST_CONTROLS))
    rows = rows.sort(pl.col("source") != "model", aside, -pl.col("value"), "source", nulls_last=True)
    return tuple(Score(*row) for row in rows.select("source", "value", "low", "high").iter_rows())


def judge(scores: Sequence[Score], leaks: Sequence[str] = (), measure: Measure = FORGERIES) -> Verdict:
    """Compare the model with every honest control by ``metrics.paired_difference.is_above_control``.

    A model is above its controls only if each strict control of ``measure`` has a value. A network above chance on
    shuffled labels has probably seen its test data. With a failed leakage check (``leaks``) no number counts.
    """
    model = next((score for score in scores if score.source == "model"), None)
    if model is None or model.value is None:
        return Verdict("no result", "No result is recorded.")
    controls = [s for s in scores if s.source != "model" and s.source not in DISHONEST_CONTROLS and s.value is not None]
    missing = _missing(controls, measure)
    # A floor that is not shown above chance denies nothing, but one that may exceed the model leaves the case open.
    unsure = [s for s in controls if s.source in _FLOORS and not _is_recognised(s)]
    controls = [s for s in controls if s not in unsure]
    best = max(controls, key=lambda score: (score.value or 0.0, score.high or 0.0), default=None)
    shuffled = next((score for score in controls if score.source == SHUFFLED_LABELS), None)
    if leaks:
        more = f" (and {len(leaks) - 1} more)" if len(leaks) > 1 else ""
        sentence = f"The leakage audit did not pass, so the model's number shows nothing: {leaks[0]}{more}"
        return Verdict("not above control", sentence, best)
    if shuffled is not None and shuffled.low is not None and shuffled.low > CHANCE_AUC:
        interval = interval_text(shuffled.value, shuffled.low, shuffled.high)
        sentence = (
            "Something leaks, or this is one of the 2 to 5 in 100 runs that chance alone lifts so far: on shuffled "
            f"labels the model scores {interval}, above chance."
        )
        return Verdict("not above control", sentence, shuffled)
    in_reach = [c for c in controls if not is_above_control(model.value, model.low, c.value, c.high)]
    if best is not None and in_reach:
        # A control with a lower value may have the wider interval.
        nearest = best if best in in_reach else max(in_reach, key=lambda score: score.high or score.value or 0.0)
        interval = interval_text(nearest.value, nearest.low, nearest.high)
        sentence = f"The model is not above its control ({source_name(nearest.source).lower()}, {interval})."
        return Verdict("not above control", f"{sentence} {missing}".strip(), nearest)
    for floor in unsure:
        if (floor.value or 0.0) > (model.value if model.low is None else model.low):
            sentence = (
                f"Not shown to be above its controls: {source_name(floor.source).lower()}, "
                f"{interval_text(floor.value, floor.low, floor.high)}, is too uncertain to say that "
                "the model is above it."
            )
            return Verdict("not shown", f"{sentence} {missing}".strip(), floor)
    if best is None or missing:
        sentence = "Nothing is shown of the model: its number stands beside no control."
        return Verdict("not shown", f"Not shown to be above its controls. {missing}" if missing else sentence, best)
    named = f"{source_name(best.source).lower()}, {number_text(best.value)}"
    return Verdict("above control", f"The model is above its best control ({named}).", best)


def _missing(controls: Sequence[Score], measure: Measure) -> str:
    """Return a sentence on the strict controls that are missing, with the commands that add them; else empty."""
    there = {score.source for score in controls}
    how: dict[str, list[str]] = {}
    for source, command in measure.strict_controls.items():
        if source not in there:
            how.setdefault(command, []).append(source_name(source).lower())
    return " ".join(f"Missing: {', '.join(names)} (to get it: {command})." for command, names in how.items())


def run_headline(run: RunPaths) -> ReportHeadline:
    """Return the headline of a run from what it has recorded so far."""
    asked = run_parameters(run)
    measured = measured_scores(run)
    status = run_status(run)
    model = next((score for score in measured.scores if score.source == "model" and score.value is not None), None)
    of_scores = (*measured.cautions, *interval_cautions(model.value, model.low, model.high)) if model else ()
    chance = measured.measure.chance
    if model and chance is not None and model.high is not None and model.high < chance:
        reason = "what predicted the labels in training predicts the opposite here."
        of_scores = (f"The whole interval lies below chance ({chance:g}): {reason}", *of_scores)
    verdict = run_verdict(run, measured)
    logged_peak = memory_peaks([run]).frame["peak_rss_bytes"].max()
    peak = as_number(status.get("peak_rss_bytes") if logged_peak is None else logged_peak)
    return ReportHeadline(
        run_id=path_to_text(run.run_id),
        experiment=path_to_text(run.experiment),
        state=as_text(status.get("state")),
        verdict=verdict,
        measure=measured.measure,
        scores=measured.scores,
        num_samples=measured.num_samples,
        num_groups=measured.num_groups,
        peak_rss_bytes=None if peak is None else int(peak),
        duration_seconds=as_number(status.get("duration_seconds")),
        started_utc=as_text(status.get("started_utc")) or started_from_name(run.run_id),
        model=ensemble_text(run) or model_name(asked),
        protocol=protocol_text(asked, recorded_corpora(run)),
        corpus=corpus_text(run),
        failure=failure(status),
        cautions=(
            *([f"The numbers are {measured.earlier}."] if measured.earlier not in verdict.sentence else []),
            *_why_a_control_wins(run, verdict),
            *leakage_audit_of(run).frame.filter(check=SIZE_AND_RATE)["finding"].to_list(),
            *floor_margin(measured.scores, measured.margin),
            *(caution for caution in trial_caution(asked) if caution != verdict.sentence),
            *parameter_cautions(asked),
            *fake_voices(run),
            *of_scores,
        ),
        earlier=measured.earlier,
        notes=(*measured.notes, *leakage_audit_of(run).notes, *run_damage(run.root)),
    )


def run_verdict(run: RunPaths, measured: MeasuredScores) -> Verdict:
    """Return the verdict on a run's scores; scores of an earlier attempt are no result."""
    if measured.notes:
        return Verdict("no result", "The results cannot be read.")
    verdict = judge(measured.scores, audit_failures(run), measured.measure)
    if "earlier attempt" in measured.earlier and verdict.standing != "no result":
        return Verdict("no result", f"The last attempt has no result. The numbers here are {measured.earlier}.")
    trial = trial_caution(run_parameters(run))
    if trial and verdict.standing == "above control":
        return replace(verdict, standing="not shown", sentence=trial[0])
    if measured.measure.leaks and verdict.standing == "above control":
        how = f"Without what leaks: {strict_command(path_to_text(run.root))}"
        sentence = f"Not shown to be above its controls. {measured.measure.leaks} {how}"
        return replace(verdict, standing="not shown", sentence=sentence)
    sentence = verdict.sentence.replace("run_notebooks.py", command_text())
    if not is_ensemble(run.root):  # whose controls are added in each of its runs
        sentence = sentence.replace("--resume RUN", shlex.join(["--resume", path_to_text(run.root)]))
    return replace(verdict, sentence=sentence)


def floor_margin(scores: Sequence[Score], margin: Score | None = None) -> tuple[str, ...]:
    """Return sentences on how well two sources of reals are distinguished, and on the model's margin over that.

    ``margin`` is the model's over the floor of the detector trained on the sources, from the same drawn groups.
    """
    known = {score.source: score for score in scores if score.value is not None}
    if "model" not in known:
        return ()
    model, floor, trained = (known.get(name) for name in ("model", *_FLOORS))
    sentences = []
    if trained is not None:
        shown = "recognises" if _is_recognised(trained) else "is not shown to recognise"
        over = interval_text(margin.value, margin.low, margin.high) if margin else "not recorded"
        sentences.append(
            f"The detector {shown} where a real comes from: trained to tell two sources of reals apart, it has "
            f"AUC {interval_text(trained.value, trained.low, trained.high)} (floor); the model's margin over it is "
            f"{over}, on the same drawn groups."
        )
    if model is not None and floor is not None and model.value is not None and floor.value is not None:
        shown = "recognises the corpus" if _is_recognised(floor) else "is not shown to recognise the corpus"
        interval = interval_text(floor.value, floor.low, floor.high)
        over = f"{abs(model.value - floor.value):.3f} {'more' if model.value >= floor.value else 'less'}"
        untrained = "" if trained is not None else " No model was trained on the sources."
        sentences.append(
            f"The model {shown}: its scores tell two sources of real videos apart with AUC {interval} (floor); "
            f"fakes from reals with {over}.{untrained}"
        )
    return tuple(sentences)


def _is_recognised(floor: Score) -> bool:
    return floor.low is not None and floor.low > CHANCE_AUC


def what_to_do(control: Score, parameters: Mapping[str, object]) -> str:
    """Return advice against a control that the model is not above; empty if there is none.

    ``parameters`` are the run's: the advice leaves out what the run does already and what its protocol excludes.
    Against a control that is not shown above chance, other videos would not help.
    """
    protocol = protocol_name(parameters)
    folds, cause, ways = protocol in (KFOLD, LENGTH_MATCHED, METADATA_MATCHED), "", []
    if control.source == METADATA_ONLY:
        if folds and protocol != METADATA_MATCHED:
            alike = "of codec, size and length: -p protocol metadata_matched"
            ways.append(f"train and test on videos that are alike in these ({alike})")
        if parameters.get("canonical") is not True:
            ways.append("measure again with -p canonical true where they are of the container")
        if not parameters.get("rescale"):
            ways.append("measure again with -p rescale 480 where they are of size and rate")
        ways.append("add reals that are like the fakes in them")
    elif control.source == LENGTH_ONLY:
        cause = "What tells the labels is how long a video is. "
        if protocol == KFOLD:
            ways.append("train and test on videos of alike lengths (-p protocol length_matched)")
        ways.append("add reals that are as long as the fakes")
    elif control.source in _FLOORS:
        if protocol != CROSS_CORPUS:
            ways.append("test on another corpus (-p protocol cross_corpus)")
        ways.append("add reals from where the fakes come from")
    if not ways:
        return ""
    if control.low is not None and control.low <= CHANCE_AUC:
        return (
            f"{source_name(control.source)} is not shown to be above chance itself, so other or matched videos would "
            "not help: the model tells too little, or the videos are too few."
        )
    return f"{cause}To do about it: {'; or '.join(ways)}."


def _why_a_control_wins(run: RunPaths, verdict: Verdict) -> tuple[str, ...]:
    """Return the features behind a control that the model is not above, and the advice against it."""
    winner = verdict.best_control
    advice = what_to_do(winner, run_parameters(run)) if winner else ""
    if verdict.standing != "not above control" or winner is None or not advice:
        return ()
    named = winner.source == METADATA_ONLY and "To do about it" in advice
    carriers = leakage_audit_of(run).frame.filter(check=METADATA_CARRIERS)["finding"].to_list() if named else []
    return (" ".join([*carriers, advice]),)


def measured_scores(run: RunPaths) -> MeasuredScores:
    """Return the main score of a run and its controls; no scores while there are none."""
    asked = run_parameters(run)
    task = run_task(asked)
    if TASKS[task].headline:
        table, answer = run.task_results, read_tables([(path_to_text(run.run_id), run.task_results)], TASK_RESULTS)
        found = replace(task_scores(answer.frame, task), notes=answer.notes)
    else:
        table, answer = run.results, results([run])
        model = answer.frame.filter((pl.col("scope") == "all") & (pl.col("source") == "model"))
        videos, groups = model.select("num_videos", "num_groups").row(0) if model.height else (None, None)
        weaker = weaker_than_one_answer(answer.frame, as_text(asked.get("operating_point")) or "")
        protocol = (
            protocol_cautions(asked, answer.frame, HEADLINE_METRIC, recorded_corpora(run)) if model.height else ()
        )
        scores = overall_scores(answer.frame)
        strict = dict(FORGERIES.strict_controls)
        if any(score.source == REAL_SOURCE_CONTROL for score in scores):  # else there were no two sources
            strict[REAL_SOURCE_CONTROL] = _HOW_TO_TRAIN_ON_SOURCES[asked.get("real_source_control") is False]
        measure = replace(FORGERIES, leaks=official_leaks(asked, leakage_audit_of(run).frame), strict_controls=strict)
        margin = next((score for score in overall_scores(answer.frame, MARGIN)), None)
        found = MeasuredScores(measure, scores, videos, groups, answer.notes, (*protocol, *weaker), margin=margin)
    if found.scores and found.measure.is_of_classes:
        found = replace(found, cautions=(*untested_classes(run), *found.cautions))
    return replace(found, earlier=earlier_attempt(run, table) if found.scores else "")


def runs_table(runs_dir: Path) -> Answer:
    """Return one row (``_RUNS_SCHEMA``) for each run under ``runs_dir``, newest first; null is not recorded."""
    rows: list[dict[str, object]] = []
    notes: list[str] = []
    runs = list_runs(runs_dir)[::-1]
    for run, (_, _, differs) in zip(runs, run_marks(runs), strict=True):
        headline = run_headline(run)
        notes += headline.notes
        rows.append({**_table_row(headline), "differs": differs})
    return Answer(pl.DataFrame(rows, schema=_RUNS_SCHEMA), tuple(notes))


_RUNS_SCHEMA = {
    "run_id": pl.String, "experiment": pl.String, "state": pl.String, "started_utc": pl.String, "model": pl.String,
    "corpus": pl.String, "differs": pl.String, "standing": pl.String, "verdict": pl.String, "measure": pl.String,
    "score": pl.Float64, "score_low": pl.Float64, "score_high": pl.Float64, "best_control": pl.String,
    "best_control_score": pl.Float64, "num_samples": pl.Int64, "num_groups": pl.Int64, "duration_seconds": pl.Float64,
    "peak_rss_bytes": pl.Int64,
}  # fmt: skip


def _table_row(headline: ReportHeadline) -> dict[str, object]:
    score, best = headline.model_score, headline.verdict.best_control
    alike = {name: vars(headline)[name] for name in _RUNS_SCHEMA if name in vars(headline)}
    return alike | {
        "state": shown_state(headline.state),
        "standing": headline.verdict.standing,
        "verdict": headline.verdict.sentence,
        "measure": headline.measure.name,
        "score": score.value if score else None,
        "score_low": score.low if score else None,
        "score_high": score.high if score else None,
        "best_control": best.source if best else None,
        "best_control_score": best.value if best else None,
    }
