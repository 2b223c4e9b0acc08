"""Which task reads which field of a run's configuration; a field that is not named here is read by all three."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fvc_lib.services.image_config import ImageFields
from fvc_lib.services.video_text_config import VideoTextFields

TASKS = ("video", "image", "video_text")

_READ_BY: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(ImageFields.model_fields, ("image",)),
    **dict.fromkeys(VideoTextFields.model_fields, ("video_text",)),
    **dict.fromkeys(
        (
            "annotations_only", "num_folds", "inner_validation_share", "augmentations_per_video", "augmentations",
            "augmentation_strength", "clip_source", "shuffle_labels", "shuffled_label_control",
        ),
        ("video",),
    ),
    **dict.fromkeys(("num_frames", "fixed_size", "model"), ("video", "video_text")),
    **dict.fromkeys(("split_validation_share", "split_test_share"), ("image", "video_text")),
    "class_balance": ("video", "image"),
}  # fmt: skip

_OF_ONE_TASK = frozenset({*ImageFields.model_fields, *VideoTextFields.model_fields})
_ONE_SPLIT = "A run of this task has one split; split_validation_share and split_test_share say how large its parts are"
_BY_LABEL = "Labels are shuffled where videos are told real from fake"
# What to do instead, by field and task.
_INSTEAD: Mapping[tuple[str, str], str] = {
    **dict.fromkeys(
        ((name, task) for name in ("num_folds", "inner_validation_share") for task in ("image", "video_text")),
        _ONE_SPLIT,
    ),
    **dict.fromkeys(
        ((name, task) for name in ("shuffle_labels", "shuffled_label_control") for task in ("image", "video_text")),
        _BY_LABEL,
    ),
    ("clip_source", "video_text"): "This task reads its clips from the store's files, with equal results",
    ("fixed_size", "image"): "The side of an image is image_size",
    ("image_size", "video"): "The side of a video's frames is fixed_size",
    ("image_size", "video_text"): "The side of a video's frames is fixed_size",
    ("model", "image"): "The network of this task is backbone",
    ("backbone", "video"): "The network of this task is model",
    ("backbone", "video_text"): "The network of this task is model",
}


def tasks_that_read(name: str) -> tuple[str, ...]:
    """The tasks of which some stage reads the field ``name``."""
    return _READ_BY.get(name, TASKS)


def read_by(task: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that ``task`` reads, in their order, but the fields of the tasks image and video_text last."""
    own = [name for name in names if task in tasks_that_read(name)]
    return sorted(own, key=lambda name: name in _OF_ONE_TASK)


def remedy(name: str, task: str) -> str:
    """What somebody who gave ``task`` the field ``name`` may have wanted, a sentence; empty: nothing is like it."""
    instead = _INSTEAD.get((name, task), "")
    return f"{instead}." if instead else ""
