"""What the one number of a run measures, by the run's task: its name, what was judged, and the scores on record."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from fvc_lib.analysis.wording import count_text, metric_name, number_text, subject_name

_FACTS = frozenset({("video_to_text", "recall"), ("captions", "content_word_recall")})
_MOST_FACTS = 6
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
    """What the scores of a headline are of.

    Attributes:
        name: as a reader meets it.
        one: what was judged, in the singular.
        chance: what knowing nothing scores, where that is the same for every corpus.
        remark: what the number does not say, a sentence; may be empty.
        is_split_in_folds: whether everything was judged once, over folds; else a test part of its own.
    """

    name: str
    one: str
    chance: float | None = None
    remark: str = ""
    is_split_in_folds: bool = False

    def circumstances(self, num_samples: int | None, num_groups: int | None) -> str:
        """How many were judged and by whom, in sentences."""
        if num_samples is None or num_groups is None:
            return f"How many {self.one}s were judged is not recorded."
        samples, groups = count_text(num_samples, self.one), count_text(num_groups, "group")
        told = (
            f"Each of {samples} was judged once, by a model that had seen no {self.one} of its group ({groups})."
            if self.is_split_in_folds
            else f"{samples} of the test part, in {groups}, {_was(num_samples)} judged once, by a model that had seen "
            f"none of {_their(num_samples)} group{'s' * (num_groups != 1)}."
        )
        return f"{told} {self.remark}".strip()


FORGERIES = Measure(
    "ROC AUC",
    "video",
    chance=0.5,
    remark="The score is visual-forensic: staged or out-of-context footage cannot be told by pixels.",
    is_split_in_folds=True,
)

# In order of preference, how subject and metric of the one number begin, and what is judged by it; of several the
# first on record.
_CHOICES = {
    "image": (("all", "top1", "image"), ("target:", "r2", "image")),
    "video_text": (("text_to_video", "recall@", "text"), ("captions", "content_word_recall", "video")),
}
_NOTHING_YET = {"image": ("Top-1 accuracy", "image"), "video_text": ("Recall, text to video", "text")}
TASKS = tuple(_CHOICES)


@dataclass(frozen=True)
class MeasuredScores:
    """The scores of one measure, the model's first, with what they were computed on."""

    measure: Measure
    scores: tuple[Score, ...] = ()
    num_samples: int | None = None
    num_groups: int | None = None


def task_scores(results: pl.DataFrame, task: str) -> MeasuredScores:
    """The one number of a run of task image or video_text, beside its controls from best to worst.

    Args:
        results: the run's rows of ``task_tables.TASK_RESULTS``; none is fine.
        task: one of ``TASKS``.
    """
    for subject, metric, one in _CHOICES[task]:
        begins = pl.col("subject").str.starts_with(subject) & pl.col("metric").str.starts_with(metric)
        rows = results.filter(begins)
        if rows.filter(pl.col("source") == "model").height:
            return _of_one(rows, one)
    return MeasuredScores(Measure(*_NOTHING_YET[task]))


def task_facts(results: pl.DataFrame) -> tuple[tuple[str, str], ...]:
    """What else is worth knowing at a glance of a run of task image or video_text: names and texts.

    Args:
        results: the run's rows of ``task_tables.TASK_RESULTS``; none is fine.
    """
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


def _of_one(rows: pl.DataFrame, one: str) -> MeasuredScores:
    """Of the first subject and metric that the model has."""
    subject, metric = rows.filter(pl.col("source") == "model").select("subject", "metric").row(0)
    rows = rows.filter(pl.col("subject") == subject, pl.col("metric") == metric)
    rows = rows.sort(pl.col("source") != "model", -pl.col("value"), "source", nulls_last=True)
    model = rows.row(0, named=True)
    scores = tuple(_score(*row) for row in rows.select("source", "value", "low", "high").iter_rows())
    named = metric_name(metric)
    name = named if subject == "all" else f"{named}, {subject_name(subject)}"
    return MeasuredScores(Measure(name, one), scores, model["num_samples"], model["num_groups"])


def _score(source: str, value: float | None, low: float | None, high: float | None) -> Score:
    exact = source in EXACT_CONTROLS and low is None and high is None
    return Score(source, value, value, value) if exact else Score(source, value, low, high)


def _was(count: int) -> str:
    return "was" if count == 1 else "were"


def _their(count: int) -> str:
    return "its" if count == 1 else "their"
