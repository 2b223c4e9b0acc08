"""What a run says in one line: its number, beside its controls, and whether it is above them."""

import datetime
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import polars as pl

from fvc_lib.analysis.read.protocols import official_leaks, protocol_cautions, protocol_text, strict_command
from fvc_lib.analysis.read.queries import memory_peaks, results
from fvc_lib.analysis.read.records import GONE, Answer, read_tables, run_status, shown_state
from fvc_lib.analysis.wording import (
    clean_text,
    count_text,
    interval_text,
    metric_name,
    number_text,
    source_name,
    subject_name,
    time_text,
)  # fmt: skip
from fvc_lib.metrics.paired_difference import is_above_control
from fvc_lib.services.atomic_files import path_to_text, read_json_object
from fvc_lib.services.config import NOT_HASHED, read_params_file
from fvc_lib.services.config_fields import RETIRED
from fvc_lib.services.digests import run_damage
from fvc_lib.services.errors import UsageError, command_text
from fvc_lib.services.run_paths import RunPaths, list_runs
from fvc_lib.services.tables import IMAGES, INDEX, LEAKAGE_AUDIT, TASK_RESULTS
from fvc_lib.services.tasks import DEFAULT_TASK, STAGES, TASKS

# --- What the one number of a run measures, by the run's task: its name, what was judged, and the scores on record

_FACTS = frozenset({("video_to_text", "recall"), ("captions", "content_word_recall")})
_MOST_FACTS = 6
_MOST_CLASSES = 12  # named in a sentence
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
    """What the scores of a headline are of: its name, and ``one`` of what was judged, in the singular.

    ``chance`` is what knowing nothing scores, where that is the same for every corpus; ``remark`` a sentence on what
    the number does not say; ``is_split_in_folds`` where everything was judged once, over folds, else a test part was;
    ``strict_controls`` are those without which nothing is claimed, with how one is got (``TaskSpec.strict_controls``).
    """

    name: str
    one: str
    chance: float | None = None
    remark: str = ""
    is_split_in_folds: bool = False
    strict_controls: Mapping[str, str] = field(default_factory=dict)
    is_of_classes: bool = False
    leaks: str = ""  # of an official split, which the number was made with all the same

    def circumstances(self, num_samples: int | None, num_groups: int | None) -> str:
        """How many were judged and by whom, in sentences."""
        if num_samples is None or num_groups is None:
            return f"How many {self.one}s were judged is not recorded."
        samples, groups = count_text(num_samples, self.one), count_text(num_groups, "group")
        if self.leaks:
            return f"Each of {samples}, in {groups}, was judged once. {self.leaks} {self.remark}".strip()
        was, their = ("was", "its") if num_samples == 1 else ("were", "their")
        told = (
            f"Each of {samples} was judged once, by a model that had seen no {self.one} of its group ({groups})."
            if self.is_split_in_folds
            else f"{samples} of the test part, in {groups}, {was} judged once, by a model that had seen none of "
            f"{their} group{'s' * (num_groups != 1)}."
        )
        return f"{told} {self.remark}".strip()


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
    """The scores of one measure, the model's first, with what they were computed on; ``notes`` as of ``Answer``.

    ``cautions`` are what must be known of them, ``earlier`` whose they are where the last attempt has not made them,
    ``margin`` is the model's over the trained floor.
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
    """The one number of a run without folds (``tables.TASK_RESULTS``), and its controls from best to worst."""
    for subject, metric, one in TASKS[task].headline:
        begins = pl.col("subject").str.starts_with(subject) & pl.col("metric").str.starts_with(metric)
        rows = results.filter(begins)
        if rows.filter(pl.col("source") == "model").height:
            return _of_one(rows, one, TASKS[task].strict_controls.get(subject, {}))
    return MeasuredScores(Measure(*TASKS[task].no_headline))


def task_facts(results: pl.DataFrame) -> tuple[tuple[str, str], ...]:
    """Names and texts of what else is worth knowing at a glance of ``tables.TASK_RESULTS``."""
    known = {(row["source"], row["subject"], row["metric"]): row for row in results.iter_rows(named=True)}
    facts = []
    targets = [subject for source, subject, metric in known if (source, metric) == ("model", "mae")]
    for subject in targets[:_MOST_FACTS]:
        row, mean = known["model", subject, "mae"], known.get(("mean_predictor", subject, "mae"))
        beside = f" (mean predictor {number_text(mean['value'], 1)})" if mean else ""
        off = f"{number_text(row['value'], 1)} {row['unit']}".strip()
        facts.append((f"{subject_name(subject)} off by", f"{off}{beside}"))
    for (source, subject, metric), row in known.items():
        if source == "model" and (subject, metric.partition("@")[0]) in _FACTS:
            facts.append((f"{metric_name(metric)}, {subject_name(subject)}", number_text(row["value"])))
    return tuple(facts[:_MOST_FACTS])


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


# --- What a reader must know of a run besides its number: where it is from, how few groups it stands on, what leaked

# Parameter, value, and what a reader of the number must then know.
_OF_PARAMETERS = (
    ("shuffle_labels", True, "Labels were shuffled by group on purpose: anything but chance would be a leak."),
    ("canonical", True, "Every video was re-encoded by one recipe before it was decoded or measured."),
)
_FEW_GROUPS = 100  # from here on intervals hold what they promise to within two or three in a hundred
FEW_GROUPS_TOLD = (
    "Simulated with groups of uneven sizes, intervals meant to hold the truth 95 times in 100 held it 88 times with 20 "
    "groups, 91 times with 40 and 93 times with 380."
)


def parameter_cautions(parameters: Mapping[str, object]) -> tuple[str, ...]:
    """What must be known because of how the run was asked for."""
    told = [sentence for name, value, sentence in _OF_PARAMETERS if parameters.get(name) == value]
    if parameters.get("corpus") == "":
        what = TASKS[run_task(parameters)].synthetic
        if not parameters.get("more_corpora"):
            told.insert(0, f"The corpus is synthetic: the number shows that the pipeline works, not how well {what}.")
        else:
            told.insert(
                0, f"Part of the videos is the synthetic sample corpus, which shows nothing of how well {what}."
            )
    kept = parameters.get("dev_samples_per_class")
    if isinstance(kept, int) and kept > 0:
        told.append(f"Trained in dev mode, on at most {count_text(kept, 'image')} of each class.")
    return tuple(told)


def interval_cautions(num_groups: int | None, low: float | None, high: float | None) -> tuple[str, ...]:
    """What must be known of a number's interval over groups; nothing where it may be taken as it stands.

    The shares are those of ``metrics.intervals.cluster_bootstrap``.
    """
    told = []
    if low is not None and low == high:
        told.append(
            "An interval without width is no certainty: no draw of these groups changes the number, others may."
        )
    if num_groups is not None and num_groups < _FEW_GROUPS:
        few = f"{count_text(num_groups, 'group')} {'is' if num_groups == 1 else 'are'} few"
        told.append(f"{few}: intervals come out too narrow (docs/numbers.md).")
    return tuple(told)


def weaker_than_one_answer(results_frame: pl.DataFrame) -> tuple[str, ...]:
    """Where the model's decisions over all folds are worse than one answer to every video (``tables.RESULTS``)."""
    rows = results_frame.filter(scope="all").select("source", "metric", "value").drop_nulls().rows()
    known = {(source, metric): value for source, metric, value in rows}
    told = []
    f1, always_fake = known.get(("model", "f1")), known.get(("constant", "f1"))
    if f1 is not None and always_fake is not None and f1 < always_fake:
        told.append(f"F1 {number_text(f1)} is below that of calling every video fake ({number_text(always_fake)}).")
    accuracy, of_constant = known.get(("model", "accuracy")), known.get(("constant", "accuracy"))
    if accuracy is not None and of_constant is not None:
        one_label = max(of_constant, 1 - of_constant)  # the constant control gives one answer, which may be the rarer
        if accuracy < one_label:
            usual = f"always giving the more frequent label ({number_text(one_label)})"
            told.append(f"Accuracy {number_text(accuracy)} is below that of {usual}.")
    return tuple(told)


def _of_fake_voices(run: RunPaths) -> tuple[str, ...]:
    """That audio is not judged, of a corpus that says of some videos that theirs is fake."""
    index = read_tables([(path_to_text(run.run_id), run.index)], INDEX).frame
    fake_voices = index.filter(pl.col("attributes").str.json_path_match("$.audio").str.to_lowercase() == "fake")
    if fake_voices.is_empty():
        return ()
    real = fake_voices.filter(label="real").height
    told = f"Audio is not judged: {count_text(fake_voices.height, 'video')} of the corpus have a fake voice"
    return (f"{told}; {real} of them count as real, because what is seen is." if real else f"{told}.",)


def _untested_classes(run: RunPaths) -> tuple[str, ...]:
    """The classes of the run's images of which none was tested, in a sentence; nothing where there are none."""
    images = read_tables([(path_to_text(run.run_id), run.images)], IMAGES).frame.drop_nulls("class_label")
    classes = set(images["class_label"])
    untested = sorted(classes - set(images.filter(part="test")["class_label"]))
    if not untested:
        return ()
    named = ", ".join(map(clean_text, untested[:_MOST_CLASSES]))
    named += f" and {len(untested) - _MOST_CLASSES} more" if len(untested) > _MOST_CLASSES else ""
    were = "was" if len(untested) == 1 else "were"
    caution = (
        f"{len(untested)} of {count_text(len(classes), 'class', 'classes')} {were} never tested ({named}): the number "
        f"is of the other {len(classes) - len(untested)}, and no overall figure is meant."
    )
    return (caution,)


def _audit(run: RunPaths) -> Answer:
    return read_tables([(path_to_text(run.run_id), run.leakage_audit)], LEAKAGE_AUDIT)


def audit_failures(run: RunPaths) -> list[str]:
    """The findings of the run's leakage audit that did not pass, or why it cannot be read."""
    audit = _audit(run)
    return [*audit.notes, *audit.frame.filter(~pl.col("passed").fill_null(value=True))["finding"]]


def audit_facts(run: RunPaths) -> tuple[tuple[str, str], ...]:
    """For the head of a report: how many of a run's checks for leaks passed; nothing where none are recorded."""
    judged = _audit(run).frame.filter(pl.col("passed").is_not_null())
    if judged.is_empty():
        return ()
    passed = int(judged["passed"].sum())
    return (("Leakage audit", f"{passed} of {count_text(judged.height, 'check')} passed"),)


HEADLINE_METRIC = "roc_auc"
# Shown to make the leak visible: a row-wise split is what the run refuses to do, so it is nothing to be compared with.
DISHONEST_CONTROLS = frozenset({"group_lookup_by_row"})

SHUFFLED_LABELS = "shuffled_labels"
METADATA_ONLY = "metadata_only"
LENGTH_ONLY = "length_only"
REAL_SOURCE_FLOOR = "real_source_floor"  # of the model's own scores
REAL_SOURCE_CONTROL = "real_source_control"  # of the same detector trained on the sources
_FLOORS = (REAL_SOURCE_FLOOR, REAL_SOURCE_CONTROL)
MARGIN = "margin_over_floor"
_OTHER_REALS = (
    "To do about it: test on another corpus (-p protocol cross_corpus), or add reals from where the fakes come from."
)
# Of a control that wins: what to do about it.
WHAT_TO_DO = {
    METADATA_ONLY: "To do about it: train and test on videos that are alike in these (of codec, size and length: -p "
    "protocol metadata_matched), measure again with -p canonical true where they are of the container, or add reals "
    "that are like the fakes in them.",
    LENGTH_ONLY: "What tells the labels is how long a video is. To do about it: train and test on videos of alike "
    "lengths (-p protocol length_matched), or add reals that are as long as the fakes.",
    **dict.fromkeys(_FLOORS, _OTHER_REALS),
}
# Of a run that was not asked for it the checkpoints serve on; one older than this control trains anew.
_HOW_TO_TRAIN_ON_SOURCES = {
    True: "run_notebooks.py --resume RUN --fork -p real_source_control true",
    False: "run_notebooks.py --force 04 --resume RUN",
}
METADATA_CARRIERS = "metadata_carriers"  # of the leakage audit: which columns give the labels away
CHANCE_AUC = 0.5

Standing = Literal["above control", "not above control", "not shown", "no result"]


@dataclass(frozen=True)
class Verdict:
    """Where the model stands beside its best honest control, in a word and a sentence."""

    standing: Standing
    sentence: str
    best_control: Score | None = None


@dataclass(frozen=True)
class ReportHeadline:
    """The head of a report. ``None`` is shown as "not recorded".

    ``scores`` are of ``measure``, over ``num_samples`` of what it judges; ``more_facts`` are name and text of what else
    is worth knowing at a glance.
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
    protocol: str = ""  # empty: folds
    corpus: str | None = None
    failure: str | None = None
    cautions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # which files are damaged or cannot be read
    earlier: str = ""  # whose the numbers are, where the run has gone on since and not come to its end
    more_facts: tuple[tuple[str, str], ...] = ()

    @property
    def model_score(self) -> Score | None:
        """The model's own score, when there is one."""
        return next((score for score in self.scores if score.source == "model" and score.value is not None), None)

    @property
    def has_few_groups(self) -> bool:
        """Whether intervals over its groups are known to come out too narrow."""
        return self.num_groups is not None and self.num_groups < _FEW_GROUPS

    @property
    def sentences(self) -> tuple[str, ...]:
        """The verdict and what to know beside it."""
        return (self.verdict.sentence, *self.cautions)


def overall_scores(results_frame: pl.DataFrame, metric: str = HEADLINE_METRIC) -> tuple[Score, ...]:
    """The scores over all folds of one run's results: the model, then its controls from best to worst, and last those
    that only show what leakage would claim.
    """
    rows = results_frame.filter((pl.col("scope") == "all") & (pl.col("metric") == metric))
    aside = pl.col("source").is_in(sorted(DISHONEST_CONTROLS))
    rows = rows.sort(pl.col("source") != "model", aside, -pl.col("value"), "source", nulls_last=True)
    return tuple(Score(*row) for row in rows.select("source", "value", "low", "high").iter_rows())


def judge(scores: Sequence[Score], leaks: Sequence[str] = (), measure: Measure = FORGERIES) -> Verdict:
    """Compare the model with every honest control by the rule of ``metrics.paired_difference.is_above_control``.

    A model is above its controls only where each strict one of ``measure`` has a value. A network that scores above
    chance on shuffled labels has seen what it is tested on, unless it is one of the few that chance alone lifts there;
    and where the leakage audit found something (``leaks``), no number counts.
    """
    model = next((score for score in scores if score.source == "model"), None)
    if model is None or model.value is None:
        return Verdict("no result", "No result is recorded.")
    controls = [s for s in scores if s.source != "model" and s.source not in DISHONEST_CONTROLS and s.value is not None]
    missing = _missing(controls, measure)
    # Two sources that chance alone parts deny nothing; a floor that may be higher than the model leaves it open.
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
        # Not always the one with the best value: a worse one may have the wider interval.
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
    """Which strict controls of ``measure`` are not among ``controls``, and how to get them; empty where all are."""
    there = {score.source for score in controls}
    how: dict[str, list[str]] = {}
    for source, command in measure.strict_controls.items():
        if source not in there:
            how.setdefault(command, []).append(source_name(source).lower())
    return " ".join(f"Missing: {', '.join(names)} (to get it: {command})." for command, names in how.items())


def run_headline(run: RunPaths) -> ReportHeadline:
    """The headline of one run from whatever it has recorded so far."""
    asked = run_parameters(run)
    measured = measured_scores(run)
    status = run_status(run)
    model = next((score for score in measured.scores if score.source == "model" and score.value is not None), None)
    of_scores = (*measured.cautions, *interval_cautions(measured.num_groups, model.low, model.high)) if model else ()
    chance = measured.measure.chance
    if model and chance is not None and model.high is not None and model.high < chance:
        below = f"The whole interval lies below chance ({chance:g}): "
        told = below + "what told the labels in training tells the opposite here."
        of_scores = (told, *of_scores)
    verdict = run_verdict(run, measured)
    return ReportHeadline(
        run_id=path_to_text(run.run_id),
        experiment=path_to_text(run.experiment),
        state=_text(status.get("state")),
        verdict=verdict,
        measure=measured.measure,
        scores=measured.scores,
        num_samples=measured.num_samples,
        num_groups=measured.num_groups,
        peak_rss_bytes=_peak_rss_bytes(run, status),
        duration_seconds=_number(status.get("duration_seconds")),
        started_utc=_text(status.get("started_utc")) or _started_from_name(run.run_id),
        model=_model_name(asked),
        protocol=protocol_text(asked),
        corpus=corpus_text(run),
        failure=_failure(status),
        cautions=(
            *([f"The numbers are {measured.earlier}."] if measured.earlier not in verdict.sentence else []),
            *_why_a_control_wins(run, verdict),
            *floor_margin(measured.scores, measured.margin),
            *parameter_cautions(asked),
            *_of_fake_voices(run),
            *of_scores,
        ),
        earlier=measured.earlier,
        notes=(*measured.notes, *_audit(run).notes, *run_damage(run.root)),
    )


def run_verdict(run: RunPaths, measured: MeasuredScores) -> Verdict:
    """Where the run's model stands by what ``measured_scores`` found; of an earlier attempt it says that alone."""
    if measured.notes:
        return Verdict("no result", "The results cannot be read.")
    verdict = judge(measured.scores, audit_failures(run), measured.measure)
    if "earlier attempt" in measured.earlier and verdict.standing != "no result":
        return Verdict("no result", f"The last attempt has no result. The numbers here are {measured.earlier}.")
    trial = trial_text(run_parameters(run))
    if trial and verdict.standing == "above control":
        return replace(verdict, standing="not shown", sentence=f"This is a {trial}: it claims nothing of the corpus.")
    if measured.measure.leaks and verdict.standing == "above control":
        how = f"Without what leaks: {strict_command(path_to_text(run.root))}"
        told = f"Not shown to be above its controls. {measured.measure.leaks} {how}"
        return replace(verdict, standing="not shown", sentence=told)
    # Where a missing control is got: of this run, as it is typed here.
    sentence = verdict.sentence.replace("run_notebooks.py", command_text())
    sentence = sentence.replace("--resume RUN", shlex.join(["--resume", path_to_text(run.root)]))
    return replace(verdict, sentence=sentence)


def floor_margin(scores: Sequence[Score], margin: Score | None = None) -> tuple[str, ...]:
    """How well two sources of reals are told apart, and how far the model is above that, where it is known.

    ``margin`` is that over the floor of the detector trained on the sources, from draws of the same groups.
    """
    known = {score.source: score for score in scores if score.value is not None}
    if "model" not in known:
        return ()
    model, floor, trained = (known.get(name) for name in ("model", *_FLOORS))
    told = []
    if trained is not None:
        shown = "recognises" if _is_recognised(trained) else "is not shown to recognise"
        over = interval_text(margin.value, margin.low, margin.high) if margin else "not recorded"
        told.append(
            f"The detector {shown} where a real comes from: trained to tell two sources of reals apart, it has "
            f"AUC {interval_text(trained.value, trained.low, trained.high)} (floor); the model's margin over it is "
            f"{over}, on the same drawn groups."
        )
    if model is not None and floor is not None and model.value is not None and floor.value is not None:
        shown = "recognises the corpus" if _is_recognised(floor) else "is not shown to recognise the corpus"
        interval, over = interval_text(floor.value, floor.low, floor.high), f"{model.value - floor.value:+.3f}"
        untrained = "" if trained is not None else " No network was trained on the sources."
        told.append(
            f"The model {shown}: its scores tell two sources of real videos apart with AUC {interval} (floor), and "
            f"fakes from reals with {over} over that.{untrained}"
        )
    return tuple(told)


def _is_recognised(floor: Score) -> bool:
    return floor.low is not None and floor.low > CHANCE_AUC


def _why_a_control_wins(run: RunPaths, verdict: Verdict) -> tuple[str, ...]:
    """Which features carry the control that the model is not above, as the audit found, and what to do about it."""
    winner = verdict.best_control.source if verdict.best_control else ""
    if verdict.standing != "not above control" or winner not in WHAT_TO_DO:
        return ()
    carriers = _audit(run).frame.filter(check=METADATA_CARRIERS)["finding"].to_list() if winner == METADATA_ONLY else []
    return (" ".join([*carriers, WHAT_TO_DO[winner]]),)


def _earlier_attempt(run: RunPaths, table: Path) -> str:
    """Whose numbers ``table`` holds where its stage, or the run after it, has not come to its end since; else empty.

    A stage that ended well wrote its table. Of another one the file's time tells, which must lie between the stage's
    last start and end; that of a copied folder may not, and then the table is called an earlier one's as well.
    """
    status = run_status(run)
    key = next((stage.name for stage in STAGES if table in stage.outputs(run, None)), "")
    stage = status["stages"].get(key)
    if not isinstance(stage, dict) or not table.is_file():  # an interactive notebook's; moved aside just now
        return ""
    if stage.get("state") == "done" and status.get("state") in ("failed", "interrupted", "requeue", GONE):
        ended = time_text(_text(stage.get("finished_utc")))
        return f"of attempt {stage.get('attempts')} of {key}, which ended {ended}"
    if stage.get("state") not in _UNFINISHED:
        return ""
    written = datetime.datetime.fromtimestamp(table.stat().st_mtime, datetime.UTC)
    began, ended_at = _moment(stage.get("started_utc")), _moment(stage.get("finished_utc"))
    second = datetime.timedelta(seconds=1)  # to which the status is rounded
    is_own = began is not None and began <= written and (ended_at is None or written <= ended_at + second)
    if stage["state"] != "pending" and is_own:
        return ""
    attempts = read_json_object(run.run_json).get("attempts")
    starts = [_moment(each.get("started_utc")) for each in attempts or () if isinstance(each, dict)]
    number = sum(start is not None and start <= written for start in starts)
    which = f"number {number}, " if number else ""
    return f"of an earlier attempt, {which}written {written:%Y-%m-%d %H:%M} UTC: {key} is {stage['state']}"


_UNFINISHED = frozenset({"failed", "interrupted", "pending", "running", "waiting", "requeue", GONE})


def _moment(utc: object) -> datetime.datetime | None:
    try:
        moment = datetime.datetime.fromisoformat(str(utc))
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def run_parameters(run: RunPaths) -> dict[str, object]:
    """What stands in the run's ``params.yaml``; nothing where it is missing or unreadable."""
    if not run.params_yaml.is_file():
        return {}
    try:
        return read_params_file(run.params_yaml)
    except UsageError:
        return {}


_MOST_MARKS = 3
# Said anyway
_NO_MARKS = frozenset({"dev_groups", "corpus", "model", "backbone", "experiment", "task", "protocol", "target_corpora"})


def run_marks(runs: Sequence[RunPaths]) -> list[tuple[str, str, str]]:
    """By what each of ``runs`` is told from the others on a list: corpus, detector, and how its parameters differ.

    A parameter that can change a number is named where its value is not the one that most of ``runs`` of its task have;
    at most ``_MOST_MARKS`` of them. Corpora of one name that hold other files have the beginning of their fingerprints.
    """
    asked = [_readable_parameters(run) for run in runs]
    usual: dict[tuple[str, str], str] = {}
    for task in {run_task(each) for each in asked}:
        alike = [each for each in asked if run_task(each) == task]
        for name in {name for each in alike for name in each}:
            counts = Counter(str(each.get(name)) for each in reversed(alike))  # of equally many the oldest run's
            usual[task, name] = counts.most_common(1)[0][0]
    marks = []
    corpora = [_corpus_name(run, each) for run, each in zip(runs, asked, strict=True)]
    contents = [_fingerprint(run) for run in runs]
    known: dict[str, set[str]] = {}
    for corpus, content in zip(corpora, contents, strict=True):
        known.setdefault(corpus, set()).update(filter(None, [content]))
    for each, corpus, content in zip(asked, corpora, contents, strict=True):
        named = [name for name in each if name not in _NO_MARKS and name not in NOT_HASHED | RETIRED.keys()]
        own = [trial] if (trial := trial_text(each)) else []
        own += [f"{name} {each[name]}" for name in named if str(each[name]) != usual[run_task(each), name]]
        more = f", {len(own) - _MOST_MARKS} more" if len(own) > _MOST_MARKS else ""
        shown = f"{corpus} {content[:6]}" if content and corpus and len(known[corpus]) > 1 else corpus
        by = ", ".join(filter(None, (_model_name(each), protocol_text(each))))
        marks.append((shown, by, ", ".join(own[:_MOST_MARKS]) + more))
    return marks


def run_labels(runs: Sequence[RunPaths]) -> list[str]:
    """``corpus · detector · what differs · experiment / run_id`` on one line each."""
    return [
        " · ".join(filter(None, (*mark, f"{path_to_text(run.experiment)} / {path_to_text(run.run_id)}")))
        for run, mark in zip(runs, run_marks(runs), strict=True)
    ]


def _readable_parameters(run: RunPaths) -> dict[str, object]:
    try:
        return run_parameters(run)
    except (OSError, ValueError, RecursionError):  # that run's own row says so
        return {}


def _corpus_name(run: RunPaths, parameters: Mapping[str, object]) -> str:
    """As recorded, else the last part of its path; empty where neither is known."""
    path = parameters.get("corpus")
    return _recorded_name(_recorded_corpus(run)) or (Path(path).name if isinstance(path, str) and path else "")


def _recorded_corpus(run: RunPaths) -> dict[str, object]:
    recorded = read_json_object(run.run_json).get("corpus")
    return recorded if isinstance(recorded, dict) else {}


def _recorded_name(recorded: Mapping[str, object]) -> str | None:
    """What the index calls the corpora; before there is one, and of the built-in corpus, what was recorded at first."""
    corpora, name = recorded.get("corpora"), _text(recorded.get("name"))
    if not isinstance(corpora, list) or not corpora or recorded.get("listing_sha256") == "":
        return name
    return " + ".join(map(str, corpora))


def _fingerprint(run: RunPaths) -> str:
    return _text(_recorded_corpus(run).get("fingerprint")) or ""


def run_task(parameters: Mapping[str, object]) -> str:
    """The task that a run's parameters name: video, image or video_text; video where none is recorded."""
    task = parameters.get("task")
    return task if isinstance(task, str) and task in TASKS else DEFAULT_TASK


def measured_scores(run: RunPaths) -> MeasuredScores:
    """The one number of a run, beside its controls; without scores while there is none."""
    asked = run_parameters(run)
    task = run_task(asked)
    if TASKS[task].headline:
        table, answer = run.task_results, read_tables([(path_to_text(run.run_id), run.task_results)], TASK_RESULTS)
        found = replace(task_scores(answer.frame, task), notes=answer.notes)
    else:
        table, answer = run.results, results([run])
        model = answer.frame.filter((pl.col("scope") == "all") & (pl.col("source") == "model"))
        videos, groups = model.select("num_videos", "num_groups").row(0) if model.height else (None, None)
        weaker = weaker_than_one_answer(answer.frame)
        told = protocol_cautions(asked, answer.frame, HEADLINE_METRIC) if model.height else ()
        scores = overall_scores(answer.frame)
        strict = dict(FORGERIES.strict_controls)
        if any(score.source == REAL_SOURCE_CONTROL for score in scores):  # else there were no two sources
            strict[REAL_SOURCE_CONTROL] = _HOW_TO_TRAIN_ON_SOURCES[asked.get("real_source_control") is False]
        measure = replace(FORGERIES, leaks=official_leaks(asked, _audit(run).frame), strict_controls=strict)
        margin = next((score for score in overall_scores(answer.frame, MARGIN)), None)
        found = MeasuredScores(measure, scores, videos, groups, answer.notes, (*told, *weaker), margin=margin)
    if found.scores and found.measure.is_of_classes:
        found = replace(found, cautions=(*_untested_classes(run), *found.cautions))
    return replace(found, earlier=_earlier_attempt(run, table) if found.scores else "")


def runs_table(runs_dir: Path) -> Answer:
    """All runs under ``runs_dir``, newest first, a row of ``_RUNS_SCHEMA`` each; null is not recorded."""
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


def _model_name(asked: Mapping[str, object]) -> str | None:
    """The network of the run's task; of a text encoder that is not the own one only that it is not."""
    model = _text(asked.get(TASKS[run_task(asked)].network))
    foreign = run_task(asked) == "video_text" and asked.get("text_encoder") not in (None, "own")
    return f"{model} with a text encoder from outside" if model and foreign else model


def corpus_text(run: RunPaths) -> str | None:
    """The name of a run's corpus and the beginning of its fingerprint; None where none is recorded."""
    name, fingerprint = _recorded_name(_recorded_corpus(run)), _fingerprint(run)
    if not name:
        return None
    trial = trial_text(run_parameters(run))
    known = f"fingerprint {fingerprint[:12]}" if fingerprint else "not indexed yet"
    return ", ".join(filter(None, (name, known, trial)))


def trial_text(parameters: Mapping[str, object]) -> str:
    """``trial on 20 groups`` of a run on a part of its corpus (``dev_groups``); empty for one on all of it."""
    number = parameters.get("dev_groups")
    return f"trial on {count_text(number, 'group')}" if isinstance(number, int) and number > 0 else ""


def _peak_rss_bytes(run: RunPaths, status: dict[str, object]) -> int | None:
    """The highest sample of the run's memory logs, which know the preflight from the work, else what the runner saw."""
    return _whole(memory_peaks([run]).frame["peak_rss_bytes"].max()) or _whole(status.get("peak_rss_bytes"))


def _failure(status: dict[str, object]) -> str | None:
    """The first stage that did not end well, in one sentence."""
    stages = status.get("stages")
    for name, stage in stages.items() if isinstance(stages, dict) else ():
        if not isinstance(stage, dict) or stage.get("state") not in ("failed", "interrupted", GONE):
            continue
        error = stage.get("error")
        told = f"{error.get('name')}: {error.get('message')}" if isinstance(error, dict) else stage.get("reason")
        return f"Stage {name} {stage['state']}: {told or 'no reason recorded'}"
    return None


def _started_from_name(run_id: str) -> str | None:
    try:
        started = datetime.datetime.strptime(run_id[4:19], "%Y%m%d_%H%M%S")  # local, as named
    except ValueError:
        return None
    return started.strftime("%Y-%m-%d %H:%M (local)")


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)
