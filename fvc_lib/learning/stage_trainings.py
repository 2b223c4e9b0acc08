"""Which function does the training of which stage; each is imported only where it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

FOLD_STAGE = "04_fold_training"
_TRAININGS = {
    FOLD_STAGE: ("fvc_lib.learning.fold_training", "train_fold"),
    "10_image_recognition": ("fvc_lib.learning.image_training", "train_images"),
    "20_video_text": ("fvc_lib.learning.video_text_training", "train_video_text"),
}
STAGES = tuple(_TRAININGS)


def training_of(stage: str) -> Callable[..., Any]:
    """``train(paths, config, fold, *, metric_log, attempt, memory, stop, progress, ranks)``, as ``train_fold``."""
    module, name = _TRAININGS[stage]
    train: Callable[..., Any] = getattr(import_module(module), name)
    return train
