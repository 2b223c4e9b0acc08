"""The public functions of FVC, for scripts and notebooks: ``import fvc_lib as fvc``.

Every name in ``__all__`` can be imported from ``fvc_lib``, which loads this module at the first use. Only these names
are stable; all other modules may change.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import numpy.typing as npt
import polars as pl

from fvc_lib.analysis.read.queries import SQL_TABLES, ask_sql
from fvc_lib.analysis.read.runs import run_parameters, run_status
from fvc_lib.services.atomic_files import AnyPath, path_to_text
from fvc_lib.services.errors import DataError, FvcError, LeakageError, UsageError, command_text, did_you_mean
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths, find_run_or_ensemble, list_runs as _list_runs

if TYPE_CHECKING:
    from fvc_lib.tasks.predicting import Predictor
    from fvc_lib.video.decode.clip import Clip

__all__ = [
    "DataError", "Detector", "FvcError", "LeakageError", "Run", "UsageError", "decode_clip", "evaluate", "index",
    "list_runs", "load_detector", "make_folds", "open_run", "train",
]  # fmt: skip


def decode_clip(path: AnyPath, num_frames: int = 8, size: int | None = None) -> "Clip":
    """Decode frames that are spread evenly over a video. The frames equal those of a complete decoding.

    Args:
        path: a local video file.
        num_frames: T, number of frames, at least 1. A shorter video repeats frames.
        size: side of the square in pixels that frames are letterboxed to; None: the video's own size.

    Returns:
        A clip with the attributes ``frames``, uint8 (T, 3, H, W), RGB and upright; ``frame_indices``, int64 (T,);
        ``pts_seconds``, float64 (T,); ``num_source_frames``; and ``content``, the box of the picture without bars.

    Raises:
        UsageError: an argument is out of range.
        FvcError: the file is missing, no video, damaged or truncated.

    Examples:
        >>> import fvc_lib as fvc
        >>> fvc.decode_clip("video.mp4", num_frames=8, size=224).frames.shape
        (8, 3, 224, 224)
    """
    from fvc_lib.video.decode import clip  # loads PyAV

    try:
        return clip.decode_clip(path, num_frames, size)
    except ValueError as error:
        raise UsageError(f"decode_clip: {error}") from error


def index(corpus: AnyPath, **parameters: Any) -> pl.DataFrame:
    """Return a table of the usable videos of a corpus: one row per video, with its label and its group.

    Copies, near-duplicates and videos of one stated group share a ``group_id``. Damaged files are left out.

    Args:
        corpus: a folder with ``real/`` and ``fake/``, a manifest with the columns ``path`` and ``label``, a tar, or a
            pattern of tars.
        parameters: fields of the configuration, such as ``near_duplicate_bits=10``.

    Returns:
        A table sorted by ``video_id``, with the columns ``video_id group_id path label duration_seconds width height``
        and more.

    Raises:
        UsageError: the corpus has no known layout, or a parameter is wrong.
        DataError: no video is usable, or only one label occurs.

    Examples:
        >>> videos = fvc.index("corpus/")
        >>> sorted(videos["label"].unique())
        ['fake', 'real']
    """
    from fvc_lib.corpus.index import build_index
    from fvc_lib.services.tables import INDEX, read_table

    config = resolve_config(command_line=parameters)
    with tempfile.TemporaryDirectory() as tables:
        build_index(Path(corpus).expanduser().absolute(), config, tables)
        return read_table(Path(tables) / "index.parquet", INDEX)


def make_folds(index: pl.DataFrame, num_folds: int = 5, seed: int = 0) -> pl.DataFrame:
    """Assign every video to one of ``num_folds`` test folds. A group is never split between folds.

    Args:
        index: a table with the columns ``video_id``, ``group_id`` and ``label`` (``real`` or ``fake``).
        num_folds: number of folds, at least 2.
        seed: chooses between assignments that are equally well balanced.

    Returns:
        A table sorted by ``video_id`` with the columns ``video_id group_id label fold``; folds begin at 0.

    Raises:
        UsageError: a column is missing, a video has two rows, there is no row, or ``num_folds`` is below 2.
        DataError: a label has fewer groups than there are folds.

    Examples:
        >>> folds = fvc.make_folds(fvc.index("corpus/"), num_folds=2)
        >>> folds.columns
        ['video_id', 'group_id', 'label', 'fold']
    """
    from fvc_lib.corpus import folds

    text, label = pl.col("video_id", "group_id").cast(pl.String), pl.col("label").cast(pl.Enum(["real", "fake"]))
    try:
        videos = index.select(text, label.cast(pl.String))
    except (AttributeError, pl.exceptions.PolarsError) as error:
        raise UsageError(
            "make_folds: wanted a polars DataFrame (polars.from_pandas makes one) with video_id, group_id and label "
            f"(real or fake); got {type(index).__name__}: {error}"
        ) from error
    if num_folds < 2:
        raise UsageError(f"make_folds: got num_folds {num_folds}, wanted 2 or more.")
    if not 0 < videos.drop_nulls().unique("video_id").height == videos.height:
        raise UsageError("make_folds: column video_id: wanted at least one video, and each in one row without nulls.")
    return folds.make_folds(videos, num_folds, seed)


def evaluate(
    labels: npt.ArrayLike,
    scores: npt.ArrayLike,
    *,
    groups: npt.ArrayLike | None = None,
    threshold: float = 0.5,
    confidence: float = 0.95,
    seed: int = 0,
) -> pl.DataFrame:
    """Return the metrics of one detector on test videos, with confidence intervals over groups.

    Args:
        labels: (N,), 0 or ``real``, and 1 or ``fake``.
        scores: float (N,), higher for fake. Metrics of probabilities are given for scores in [0, 1] only.
        groups: (N,) of group ids; videos of one group are copies or belong together. None: every video counts as a
            group, and intervals are too narrow if there are copies.
        threshold: a video with at least this score is called fake.
        confidence: coverage of the intervals, between 0 and 1.
        seed: seed of the random half-samples from which the intervals are computed.

    Returns:
        A table with the columns ``metric value low high num_videos num_groups``. A value that is not defined, such as
        an AUC of one class, is null.

    Raises:
        UsageError: arrays differ in length, or have a value that is not allowed.

    Examples:
        >>> found = fvc.evaluate([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8], groups=["a", "b", "c", "d"])
        >>> found.filter(metric="roc_auc")["value"].item()
        0.75
    """
    from fvc_lib.metrics.classification import check_labels, check_scores
    from fvc_lib.metrics.cross_validation import METRICS, PROBABILITY_METRICS, measure_over_folds
    from fvc_lib.metrics.intervals import group_intervals

    words = {"real": 0, "fake": 1}
    numbers = [words.get(str(label).lower(), label) for label in np.asarray(labels).tolist()]
    try:
        checked = check_labels(np.asarray(numbers, np.float64))
        values = check_scores(scores, len(checked))
        named = np.arange(len(checked)) if groups is None else np.asarray(groups)
        is_probability = bool(values.min() >= 0 and values.max() <= 1)
        names = [name for name in METRICS if is_probability or name not in PROBABILITY_METRICS]
        folds = np.zeros(len(checked))
        measures = [measure_over_folds(name, values, threshold, folds) for name in names]
        found = group_intervals(checked, measures, named, seed=seed, confidence=confidence)
    except (TypeError, ValueError) as error:
        raise UsageError(f"evaluate: {error}") from error
    columns = ("metric", "value", "low", "high", "num_videos", "num_groups")
    rows = [(name, *interval.row()) for name, interval in zip(names, found, strict=True)]
    return pl.DataFrame(rows, columns, orient="row")


class Detector:
    """A trained model that predicts on new files; ``load_detector`` returns it.

    Attributes:
        name: name of the run, ensemble or bundle.
        task: ``video``, ``image`` or ``video_text``.
        worth: sentences on whether the model is better than its controls (models that can use only shortcuts).
    """

    def __init__(self, predictor: "Predictor") -> None:
        self._model = predictor
        self.name, self.task = predictor.name, predictor.config.task
        self.worth = tuple(predictor.standing.sentences)

    def predict(self, files: AnyPath | Sequence[AnyPath], *, error_rate: float = 0.1) -> pl.DataFrame:
        """Return a table of predictions with one row per file, in the order of ``files``.

        For videos the columns are ``path``, ``score`` (calibrated probability of fake, mean over networks),
        ``score_low`` and ``score_high`` (range over the networks), ``verdict`` (``real``, ``fake`` or ``undecided``),
        ``reasons`` (list of sentences) and ``failure``. ``failure`` is the reason why a file could not be read, else
        null. If the model is not shown to be above its controls (models that can use only shortcuts), no verdict is
        ``real`` or ``fake``. For other tasks the columns are ``path``, columns of the task, and ``failure``.

        Args:
            files: one path or several.
            error_rate: share of real videos that may be called fake, and of fake videos that may be called real.

        Raises:
            UsageError: the rate is not between 0 and 1.

        Examples:
            >>> fvc.load_detector("latest").predict(["a.mp4", "b.mp4"])["path"].to_list()
            ['a.mp4', 'b.mp4']
        """
        from fvc_lib.tasks.video.predicting import VideoDetector
        from fvc_lib.tasks.video.verdicts.judging import judge_files
        from fvc_lib.tasks.video.verdicts.rule import rule_of

        detector = self._model
        paths = [Path(file) for file in ([files] if isinstance(files, str | PathLike) else files)]
        absolute = list(dict.fromkeys(path.absolute() for path in paths))
        if not isinstance(detector, VideoDetector):
            findings = {found.path: found for found in detector.findings(absolute)}
            found_for = [(path, findings[path_to_text(path.absolute())]) for path in paths]
            rows = [{"path": str(path), **found.values, "failure": found.failure or None} for path, found in found_for]
            return pl.DataFrame(rows, infer_schema_length=None)
        rule = rule_of(error_rate, withheld=not detector.is_above_control)
        with tempfile.TemporaryDirectory() as folder:
            answers = dict(zip(absolute, judge_files(detector, absolute, rule, Path(folder)).rows(), strict=True))
        rows = [answers[path.absolute()] | {"path": str(path)} for path in paths]
        split = [row | {"reasons": row["reasons"].splitlines()} for row in rows]
        types: dict[str, Any] = {"path": pl.String, **dict.fromkeys(("score", "score_low", "score_high"), pl.Float64)}
        types |= {"verdict": pl.String, "reasons": pl.List(pl.String), "failure": pl.String}
        return pl.DataFrame(split, types)


def load_detector(path: AnyPath, *, allow_code: bool = False) -> Detector:
    """Return the trained detector of a finished run, an ensemble or an exported bundle, of any task.

    Args:
        path: ``latest``, a run id, a run folder, a bundle's folder, or ``models:/NAME@ALIAS`` of MLflow's registry.
        allow_code: whether Python code of a bundle's author may run.

    Raises:
        UsageError: there is no such run or bundle, or the run is unfinished.
        FvcError: a file of the run or bundle is damaged.

    Examples:
        >>> detector = fvc.load_detector("latest")
        >>> detector.task
        'video'
    """
    from fvc_lib.command_line import models  # loads torch

    folder = models.find_model(resolve_config().runs_dir, str(path))
    return Detector(models.load_detector(folder, allow_code=allow_code))


class Tables:
    """The tables of a run as attributes, such as ``run.tables.predictions``; ``dir(run.tables)`` names them."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths

    def __dir__(self) -> list[str]:
        return sorted(SQL_TABLES)

    def __getattr__(self, name: str) -> pl.DataFrame:
        if name not in SQL_TABLES:
            raise AttributeError(f"a run has no table {name!r}.{did_you_mean(name, SQL_TABLES)}")
        answer = SQL_TABLES[name]([self._paths])
        if answer.frame.is_empty() and answer.notes:
            raise DataError(" ".join(answer.notes))
        return answer.frame


@dataclass(frozen=True)
class Run:
    """A run on the disk; ``open_run`` and ``train`` return it.

    Attributes:
        path: the run's folder.
    """

    path: Path

    @property
    def id(self) -> str:
        """Name of the run's folder."""
        return self.path.name

    @property
    def state(self) -> str:
        """State of the run, such as ``done``, ``running`` or ``failed``; ``unknown`` if it is not recorded."""
        return str(run_status(RunPaths(self.path)).get("state", "unknown"))

    @property
    def parameters(self) -> Mapping[str, object]:
        """Effective parameters of the run, by name."""
        return run_parameters(RunPaths(self.path))

    @property
    def tables(self) -> Tables:
        """Tables of the run as polars frames: ``run.tables.predictions``, ``run.tables.results``."""
        return Tables(RunPaths(self.path))

    @property
    def headline(self) -> tuple[str, ...]:
        """First sentences of the report: whether the model is above its controls, then the limits of this result.

        Controls are models that can use only shortcuts, such as metadata.
        """
        from fvc_lib.analysis.read.headline import run_headline

        return run_headline(RunPaths(self.path)).sentences

    def sql(self, query: str, **parameters: object) -> pl.DataFrame:
        """Run a SQL query (SELECT) on the run's tables, and return its rows; at most 100,000 rows and 60 s.

        Args:
            query: SQL of DuckDB; ``dir(run.tables)`` names the tables.
            parameters: values of ``$name`` in the query.

        Raises:
            UsageError: the query is wrong.

        Examples:
            >>> fvc.open_run("latest").sql("SELECT count(DISTINCT label) AS labels FROM predictions")["labels"].item()
            2
        """
        try:
            return ask_sql([RunPaths(self.path)], query, parameters or None).frame
        except (duckdb.Error, ValueError) as error:
            raise UsageError(f"sql: {error}") from error


def open_run(run: AnyPath = "latest") -> Run:
    """Return a run on the disk, whose state, parameters and tables can then be read.

    Args:
        run: ``latest``, a run id, a part of a run id, or a run folder.

    Raises:
        UsageError: there is no such run.

    Examples:
        >>> run = fvc.open_run("latest")
        >>> run.tables.predictions["label"].n_unique()
        2
    """
    return Run(find_run_or_ensemble(Path(resolve_config().runs_dir), str(run)).root)


def list_runs() -> list[Run]:
    """Return all runs of the runs folder, oldest first."""
    return [Run(paths.root) for paths in _list_runs(resolve_config().runs_dir)]


def train(corpus: AnyPath = "", **parameters: Any) -> Run:
    """Run the whole pipeline on a corpus, as the command line does, and return the finished run.

    Progress is printed. The function returns when the run's report is written.

    Args:
        corpus: a folder with ``real/`` and ``fake/``, a manifest, a tar, or a pattern of tars, as for ``index``. Empty:
            the built-in sample corpus.
        parameters: fields of the configuration, such as ``model="probe:efficientnet_lite0"`` or ``num_folds=5``.

    Raises:
        UsageError: a parameter or the corpus is wrong.
        FvcError: the run did not finish; the message names its folder and how to go on.

    Examples:
        >>> run = fvc.train("corpus/", model="probe:efficientnet_lite0")  # doctest: +SKIP
        >>> run.headline[0]  # doctest: +SKIP
        'The model is above its best control (metadata only, 0.612).'
    """
    from fvc_lib.command_line.run_command import RunCommand, RunOptions
    from fvc_lib.execution.run.which_run import given_values
    from fvc_lib.services.home import NOTEBOOKS

    given = given_values(options={"corpus": str(corpus), **parameters})
    command = RunCommand(NOTEBOOKS, RunOptions(), given)
    exit_code = command.execute()
    sys.stdout.flush()
    if command.run is None or exit_code:
        go_on = command_text("--resume", command.run.root) if command.run else "train again"
        raise FvcError(f"train: the run ended with exit code {exit_code}. To go on: {go_on}")
    return Run(command.run.root)
