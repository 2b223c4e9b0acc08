"""Refusal of an index of images that nothing can be made of, and sentences about one that can."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import polars as pl

from fvc_lib.corpus.listing import NOT_A_LOSS
from fvc_lib.services.errors import DataError
from fvc_lib.services.task_tables import PARTS

# Left out without anything being wrong with the corpus.
_NO_LOSS = NOT_A_LOSS | {"copy_across_split", "duplicate_row", "no_picture", "nothing_to_learn"}
_MOST_REASONS = 3
_MOST_CLASSES = 8


def classes_of(images: pl.DataFrame) -> tuple[str, ...]:
    """The classes that occur in an IMAGES table, sorted."""
    return tuple(sorted(images["class_label"].drop_nulls().unique().to_list()))


def refuse_lost(root: Path, rejected: pl.DataFrame, num_kept: int, max_rejected_share: float) -> None:
    """Stop where too little is left of what a corpus lists.

    Raises:
        DataError: no usable image, or more than ``max_rejected_share`` of the listed ones lost. Copies, files nobody
            listed and images with nothing to learn are no loss.
    """
    lost = rejected.filter(~pl.col("reason").is_in(sorted(_NO_LOSS)))
    share = lost.height / max(1, lost.height + num_kept)
    if num_kept and share <= max_rejected_share:
        return
    counts = Counter((lost if lost.height else rejected)["reason"].to_list()).most_common(_MOST_REASONS)
    shown = "; ".join(
        f"{count:,} x {reason}, such as: {rejected.filter(pl.col('reason') == reason)['detail'][0]}"
        for reason, count in counts
    )
    if not num_kept:
        raise DataError(f"corpus {str(root)!r}: no usable image ({shown or 'it lists none; put images into it'}).")
    raise DataError(
        f"corpus {str(root)!r}: {share:.0%} of the listed images cannot be used, at most {max_rejected_share:.0%} are "
        f"allowed ({shown}). Repair the corpus, or raise max_rejected_share."
    )


def refuse_unlearnable(images: pl.DataFrame, targets: pl.DataFrame) -> None:
    """Stop on tables that a model cannot be trained on, chosen by and tested with.

    Raises:
        DataError: a part without images, or one class alone and no numbers.
    """
    counts = Counter(images["part"].to_list())
    empty = [part for part in PARTS if not counts[part]]
    if empty:
        have = ", ".join(f"{counts[part]:,} {part}" for part in PARTS if counts[part])
        raise DataError(
            f"the split leaves no image for {' and '.join(empty)} ({have}). Add images of other groups, or change the "
            "corpus's own split."
        )
    classes = classes_of(images)
    if len(classes) < 2 and targets.is_empty():
        raise DataError(
            f"the images have {len(classes)} class ({', '.join(classes)}) and no number to predict: one class alone "
            "cannot be told from anything. Add images of another class, or a manifest with numbers."
        )


def class_notes(images: pl.DataFrame) -> list[str]:
    """A sentence about classes that are never trained on."""
    trained = set(images.filter(part="train")["class_label"].to_list())
    never = [name for name in classes_of(images) if name not in trained]
    if not never:
        return []
    names = ", ".join(repr(name) for name in never[:_MOST_CLASSES])
    return [f"{len(never):,} classes have no training image, so none of their test images can be right: {names}."]


def rejection_notes(rejected: pl.DataFrame) -> list[str]:
    """A sentence that counts what is left out, by reason."""
    if rejected.is_empty():
        return []
    counts = ", ".join(f"{count:,} x {reason}" for reason, count in Counter(rejected["reason"].to_list()).most_common())
    return [f"Left out: {counts}."]
