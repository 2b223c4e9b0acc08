"""What the tests of engine, tasks and detectors share: fixtures and small trainings."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.loop import Engine, EngineSettings
from fvc_lib.services.checkpoint_files import CheckpointBinding, CheckpointFolder
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import AUGMENTED, FOLDS, INDEX, PREDICTIONS, check_table, read_table, write_table
from fvc_lib.tasks.video import controls
from fvc_lib.tasks.video.calibration import RecordedSelection, Selection
from fvc_lib.tasks.video.data import ClipDataset, FoldClips, class_weights, clip_rows
from fvc_lib.tasks.video.training import VideoTask
from fvc_lib.video.clips.store import ClipStore
from tests.kits.engine_kit import SETTINGS, Observer, draining
from tests.kits.task_kit import TinyTasks, write_pictures


class ScoredTables:
    """Small tables in the schemas of the stages, for the tests of controls and results."""

    @staticmethod
    def folds(num_groups: int = 20, per_group: int = 3, num_folds: int = 4) -> pl.DataFrame:
        """Groups of one label, dealt out so that each fold holds both labels."""
        groups = np.repeat(np.arange(num_groups), per_group)
        return check_table(
            pl.DataFrame(
                {
                    "video_id": [f"video{row:05d}" for row in range(groups.size)],
                    "group_id": [f"group <{group}>\n'" for group in groups],
                    "label": ["fake" if group % 2 else "real" for group in groups],
                    "fold": (groups // 2 % num_folds).astype(np.int64),
                }
            ),
            FOLDS,
            "test",
        )

    @staticmethod
    def index(folds: pl.DataFrame, **columns: list[object]) -> pl.DataFrame:
        """An index of ``folds`` in which nothing but the given columns differs between videos."""
        count = folds.height
        ids = folds["video_id"].to_list()
        values: dict[str, object] = {
            **{name: [None] * count for name, column in INDEX.columns.items() if column.has_nulls},
            "video_id": ids,
            "path": [f"{video}.mp4" for video in ids],
            "label": folds["label"],
            "group_id": folds["group_id"],
            "source_id": ids,
            "label_source": ["folder"] * count,
            "corpus": ["clips"] * count,
            "codec": ["h264"] * count,
            "container": ["mov,mp4"] * count,
            "width": [64] * count,
            "height": [48] * count,
            "num_frames": [30] * count,
            "rotation_degrees": [0] * count,
            "has_audio": [False] * count,
            "size_bytes": [1000] * count,
            "content_sha256": [hashlib.sha256(video.encode()).hexdigest() for video in ids],
        }
        schema = {name: column.dtype for name, column in INDEX.columns.items()}
        frame = pl.DataFrame({**values, **columns}, schema_overrides=schema)
        return check_table(frame.select(list(INDEX.columns)), INDEX, "test")

    @staticmethod
    def predictions(
        folds: pl.DataFrame, scores: np.ndarray, *, threshold_of_fold: dict[int, float] | None = None
    ) -> pl.DataFrame:
        """Predictions with a shuffled-label control that scores noise against rotated labels."""
        noise = np.random.default_rng(11).uniform(size=folds.height)
        thresholds = threshold_of_fold or {}
        scored = pl.Series(scores, dtype=pl.Float64)
        return check_table(
            folds.with_columns(
                score=scored,
                threshold=pl.Series([thresholds.get(fold, 0.5) for fold in folds["fold"]], dtype=pl.Float64),
                logit=2 * (scored / (1 - scored)).log().clip(-99, 99),
                temperature=pl.lit(2.0),
                control_score=pl.Series(noise),
                control_label=pl.Series(np.roll(folds["label"].to_numpy(), 7)),
                source_score=pl.lit(None, pl.Float64),
                source_label=pl.lit(None, pl.Int64),
            ),
            PREDICTIONS,
            "test",
        )


@pytest.fixture(scope="session")
def tables() -> type[ScoredTables]:
    return ScoredTables


@pytest.fixture(scope="module")
def few_rounds() -> Iterator[None]:
    """Fit the metadata control with five trees instead of a hundred."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controls, "metadata_only", partial(controls.metadata_only, rounds=5))
        yield


@dataclass(frozen=True)
class TinyTraining:
    """A run folder and clip store with which real training takes seconds: fakes have a noisy patch that jumps."""

    paths: RunPaths
    config: RunConfig

    @property
    def store(self) -> ClipStore:
        return ClipStore.of(self.config)

    def with_config(self, **changes: object) -> TinyTraining:
        """The same run under another configuration."""
        return TinyTraining(self.paths, RunConfig(**{**self.config.model_dump(), **changes}))

    def note_clips(self) -> None:
        """Write ``augmented_metadata.csv`` of the videos whose original is in the store: what 03 would have made."""
        rows = [
            {
                "clip_id": f"{video_id}_{number}", "video_id": video_id, "group_id": group, "label": label,
                "augmentation_index": number, "operations": "[]", "settings_hash": self.store.settings_hash,
                "clip_path": "x",
            }
            for video_id, group, label, _ in read_table(self.paths.folds, FOLDS).iter_rows()
            for number in range(self.config.augmentations_per_video + 1)
            if self.store.has(video_id, 0)
        ]  # fmt: skip
        write_table(pl.DataFrame(rows), AUGMENTED, self.paths.augmented_metadata)

    def task(self, num_training_rows: int = 22, model: str = "frame_cnn") -> VideoTask:
        """The video task on some of the videos, with an uneven last effective batch at an effective batch of 8."""
        rows = clip_rows(read_table(self.paths.folds, FOLDS), 1)
        training = list(rows[:-12])[:num_training_rows]
        validation = [row for row in rows[-12:] if row.augmentation_index == 0]
        data = ClipDataset(self.store, training), ClipDataset(self.store, validation)
        return VideoTask(*data, config=RunConfig(model=model), weights=class_weights(training))


def draw_clip(video_id: str, augmentation_index: int, fake: bool) -> np.ndarray:
    """A smooth picture with a little noise, uint8 (4, 3, 24, 24); in a fake some cells are much noisier."""
    seed = int.from_bytes(hashlib.sha256(f"{video_id}/{augmentation_index}".encode()).digest()[:4], "big")
    generator = np.random.default_rng(seed)
    slope = generator.uniform(-3, 3, (1, 3, 1, 1)) * np.arange(24)
    clip = 128 + slope + generator.normal(0, 2, (4, 3, 24, 24))
    if fake:
        top, left = generator.integers(0, 12, 2)
        clip[..., top : top + 12, left : left + 12] += generator.normal(0, 25, (4, 3, 12, 12))
    return clip.round().clip(0, 255).astype(np.uint8)


def tiny_training_in(folder: Path) -> TinyTraining:
    """The tiny training below ``folder``; what is there already stays."""
    config = RunConfig(
        cache_dir=str(folder / "cache"), num_folds=3, num_frames=4, fixed_size=24, augmentations_per_video=1,
        model="frame_cnn", epochs=2, batch_size=4, effective_batch_size=8, learning_rate=0.01, device="cpu",
        memory_preflight=False, inner_validation_share=0.25,
    )  # fmt: skip
    tiny = TinyTraining(RunPaths(folder / "runs" / "tiny" / "run_0"), config)
    if tiny.paths.folds.exists():
        return tiny
    folds = ScoredTables.folds(num_groups=18, per_group=2, num_folds=3)
    write_table(folds, FOLDS, tiny.paths.folds)
    for video_id, label in folds.select("video_id", "label").iter_rows():
        for index in (0, 1):
            tiny.store.write(video_id, index, draw_clip(video_id, index, label == "fake"))
    tiny.note_clips()
    return tiny


@pytest.fixture(scope="session")
def drawn_tiny_training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its clips and tables, drawn once; only copied."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_training_in(folder)
    return folder


@pytest.fixture
def tiny_training(drawn_tiny_training: Path, tmp_path: Path) -> TinyTraining:
    shutil.copytree(drawn_tiny_training, tmp_path, dirs_exist_ok=True)
    return tiny_training_in(tmp_path)


def recorded_selection(clips: FoldClips) -> RecordedSelection:
    """Of ``clips``, with made-up values: the threshold and temperature of ``conftest``'s predictions."""
    chosen = Selection(
        num_epochs=3, best_epoch=2, validation_loss=0.5, prior_logit=0.0, temperature=2.0, log_loss=0.4,
        log_loss_uncalibrated=0.4, threshold=0.5, balanced_accuracy=0.9, num_videos=8, num_groups=4, num_real=4,
        num_fake=4, fewest_groups=9,
    )  # fmt: skip
    return RecordedSelection(chosen, clips.fingerprint, "0" * 64)


class ListLog:
    """A metric sink that keeps what it is told; the values as text, so that NaN equals NaN."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, int, str, str, str]] = []

    def log(self, *, step: int, epoch: int, phase: str, metrics: Mapping[str, float]) -> None:
        self.lines += [(step, epoch, phase, name, repr(float(value))) for name, value in metrics.items()]

    def values(self, phase: str, metric: str) -> list[float]:
        """The values of one metric in the order they came."""
        return [float(line[4]) for line in self.lines if line[2:4] == (phase, metric)]


@pytest.fixture
def list_log() -> type[ListLog]:
    return ListLog


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pictures of the tiny image task."""
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder)
    return folder


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """Which task a test is about; ``task_kit.each_task`` asks for all of them."""
    return str(getattr(request, "param", "video"))


@pytest.fixture
def tasks(kind: str, pictures: Path) -> TinyTasks:
    """Makes that task in its tiny size."""
    return TinyTasks(kind, pictures)


@pytest.fixture
def make_engine(tasks, list_log, tmp_path):
    """An engine on the tiny task, with its log as ``engine.log``."""

    def make(folder="fold", *, before=lambda model, batch: None, task=None, stop=None, progress=None, memory=None,
             compute=None, **changes):  # fmt: skip
        log = list_log()
        checkpoints = CheckpointFolder(tmp_path / folder, CheckpointBinding({"lr": changes.get("learning_rate")}, ""))
        engine = Engine(
            task or draining(tasks(), before),
            EngineSettings(**{**SETTINGS, **changes}),
            compute or resolve_device("cpu"),
            checkpoints,
            log,
            stop=stop,
            progress=progress,
            memory=memory,
        )
        engine.log = log
        return engine

    return make


@pytest.fixture
def observer():
    return Observer()
