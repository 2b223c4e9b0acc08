"""What a field of the configuration means to one task, where its own description speaks of another's things.

Fields are shared, and are described for the task video; a table of settings of a run with images should not speak of
clips and folds.
"""

from __future__ import annotations

from collections.abc import Mapping

_IMAGES, _PAIRS = "image", "video_text"


def _both(image: str, video_text: str) -> Mapping[str, str]:
    return {_IMAGES: image, _PAIRS: video_text}


def _same(text: str) -> Mapping[str, str]:
    return _both(text, text)


_MEANINGS: Mapping[str, Mapping[str, str]] = {
    "corpus": _both(
        "folder or manifest of images; empty: the generated pictures of dishes",
        "manifest of videos and texts, or a folder with one; empty: the generated clips with captions",
    ),
    "max_rejected_share": _both(
        "stop when more than this share of the listed images is unusable",
        "stop when more than this share of the listed videos is unusable",
    ),
    "near_duplicate_bits": _both(
        "pictures with hashes closer than this that look alike join groups; 0: off",
        "videos with perceptual hashes closer than this many of 64 bits join groups; 0: off",
    ),
    "split_validation_share": _same("share of the training groups that chooses the epoch"),
    "split_test_share": _same("share of the groups tested on, where the corpus has no split of its own"),
    "model": {_PAIRS: "network of the video encoder"},
    "epochs": _same("at most this many passes over the training part"),
    "batch_size": _both(
        "images in memory at once; 0: the safe default (8)", "pairs in memory at once; 0: the safe default (8)"
    ),
    "effective_batch_size": _both(
        "images per optimizer step, reached by accumulation", "pairs per optimizer step, reached by accumulation"
    ),
    "class_balance": {_IMAGES: "loss: weigh classes; sampler: draw them evenly; none"},
    "early_stopping_epochs": _same("stop after this many epochs without a better validation loss; 0: never"),
    "num_ranks": _same("processes, one per GPU where there are any, that share the training"),
    "max_nonfinite_steps": _same("so many steps with a NaN or infinite loss are skipped; one more stops the stage"),
    "micro_batch_recovery_steps": _both(
        "after an out-of-memory, double the images again after so many steps; 0: never",
        "after an out-of-memory, double the pairs again after so many steps; 0: never",
    ),
    "cache_dir": _both(
        "where what is known of each image is shared between runs", "where decoded clips are shared between runs"
    ),
}


def meaning_for(task: str, name: str) -> str | None:
    """What the field ``name`` means to ``task``; None where that is what its description says."""
    return _MEANINGS.get(name, {}).get(task)
