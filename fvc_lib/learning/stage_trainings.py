"""Which function does the training of which stage; each is imported only where it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

FOLD_STAGE = "04_fold_training"
# Modules of this package, without its name: with it (``execution.code_version``) every training would depend on the
# code of every other task, and mending the one would repeat the others. What a stage trains with its notebook names.
_TRAININGS = {
    FOLD_STAGE: ("fold_training", "train_fold"),
    "10_image_recognition": ("image_training", "train_images"),
    "20_video_text": ("video_text_training", "train_video_text"),
}
STAGES = tuple(_TRAININGS)


def training_of(stage: str) -> Callable[..., Any]:
    """``train(paths, config, fold, *, metric_log, attempt, memory, stop, progress, ranks)``, as ``train_fold``."""
    module, name = _TRAININGS[stage]
    train: Callable[..., Any] = getattr(import_module(f"{__package__}.{module}"), name)
    return train
