"""What the tests of this room share."""

from __future__ import annotations

import hashlib

import numpy as np
import polars as pl
import pytest

from fvc_lib.services.tables import FOLDS, INDEX, PREDICTIONS, check_table


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
            "video_id": ids,
            "path": [f"{video}.mp4" for video in ids],
            "label": folds["label"],
            "group_id": folds["group_id"],
            "source_id": ids,
            "label_source": ["folder"] * count,
            "stated_group": [None] * count,
            "manipulation": [None] * count,
            "platform": [None] * count,
            "codec": ["h264"] * count,
            "container": ["mov,mp4"] * count,
            "pixel_format": [None] * count,
            "width": [64] * count,
            "height": [48] * count,
            "frames_per_second": [None] * count,
            "num_frames": [30] * count,
            "duration_seconds": [None] * count,
            "rotation_degrees": [0] * count,
            "has_audio": [False] * count,
            "size_bytes": [1000] * count,
            "bits_per_second": [None] * count,
            "content_sha256": [hashlib.sha256(video.encode()).hexdigest() for video in ids],
            "perceptual_hash": [None] * count,
        }
        schema = {name: column.dtype.type for name, column in INDEX.columns.items()}
        return check_table(pl.DataFrame({**values, **columns}, schema=schema), INDEX, "test")

    @staticmethod
    def predictions(
        folds: pl.DataFrame, scores: np.ndarray, *, threshold_of_fold: dict[int, float] | None = None
    ) -> pl.DataFrame:
        """Predictions with a shuffled-label control that scores noise against rotated labels."""
        noise = np.random.default_rng(11).uniform(size=folds.height)
        thresholds = threshold_of_fold or {}
        return check_table(
            folds.with_columns(
                score=pl.Series(scores, dtype=pl.Float64),
                threshold=pl.Series([thresholds.get(fold, 0.5) for fold in folds["fold"]], dtype=pl.Float64),
                control_score=pl.Series(noise),
                control_label=pl.Series(np.roll(folds["label"].to_numpy(), 7)),
            ),
            PREDICTIONS,
            "test",
        )


@pytest.fixture(scope="session")
def tables() -> type[ScoredTables]:
    return ScoredTables
