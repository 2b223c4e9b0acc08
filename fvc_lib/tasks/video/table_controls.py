"""Controls for a table of anyone's scores: what its videos' groups, lengths and containers give away."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from fvc_lib.corpus.folds import make_folds, most_folds
from fvc_lib.corpus.index import build_index, used_for
from fvc_lib.corpus.score_table import ScoreTable, with_corpus
from fvc_lib.services.config import RunConfig
from fvc_lib.services.tables import INDEX, REJECTED, read_table
from fvc_lib.tasks.video import controls
from fvc_lib.tasks.video.controls import (
    CONSTANT,
    GROUP_LOOKUP_BY_GROUP,
    GROUP_LOOKUP_BY_ROW,
    LENGTH_ONLY,
    METADATA_ONLY,
)

_MOST_FOLDS = 5


def controls_of_scores(
    videos: pl.DataFrame, groups: Sequence[str], of_corpus: pl.DataFrame | None = None, *, seed: int = 0
) -> tuple[dict[str, pl.DataFrame], list[str]]:
    """Out-of-fold scores of each control that can be computed, and what is missing.

    Args:
        videos: ``video_id label`` in the order of ids.
        groups: (N,) group of each.
        of_corpus: INDEX columns of the videos that a corpus has, ``video_id`` as in ``videos``; None: no corpus.
        seed: of folds and the careless split.

    Returns:
        By name ``video_id group_id label fold score threshold``, rows as in ``videos``, the last three null where the
        corpus has no such video; and sentences about controls
        that are missing.
    """
    rows = videos.select("video_id", "label", group_id=pl.Series("group_id", list(groups), dtype=pl.String))
    num_folds = min(_MOST_FOLDS, most_folds(rows))
    if num_folds < 2:
        return {}, ["No control: a label is in fewer than two groups, so nothing can be learned and tested."]
    folds = make_folds(rows, num_folds, seed)
    found, missing = {CONSTANT: controls.constant(folds)}, []
    if folds["group_id"].n_unique() < folds.height:
        found[GROUP_LOOKUP_BY_GROUP] = controls.group_lookup(folds)
        found[GROUP_LOOKUP_BY_ROW] = controls.group_lookup(controls.split_by_row(folds, seed=seed))
    else:
        missing.append("No group lookup: every video is a group of its own.")
    if of_corpus is None:
        missing.append(
            "No metadata and no clip length control: without the videos (--corpus) nobody can say whether codec, frame "
            "size or length give the labels away."
        )
        return found, missing
    there = rows.join(of_corpus, on="video_id", how="semi", maintain_order="left")
    lost = f"{rows.height - there.height:,} of {rows.height:,} videos are not in the corpus"
    num_folds = min(_MOST_FOLDS, most_folds(there))
    if num_folds < 2:
        missing.append(f"No metadata and no clip length control: {lost}, and the others are too few groups of a label.")
        return found, missing
    if there.height < rows.height:
        missing.append(
            f"The metadata and clip length controls, and detectors beside them, are of fewer videos: {lost}."
        )
    folds = make_folds(there, num_folds, seed)
    for name, columns in ((METADATA_ONLY, (*controls.CATEGORIES, *controls.NUMBERS)), (LENGTH_ONLY, controls.LENGTH)):
        scored = controls.metadata_only(of_corpus, folds, columns).drop("group_id", "label")
        found[name] = rows.join(scored, on="video_id", how="left", maintain_order="left")
    return found, missing


def found_in_corpus(table: ScoreTable, config: RunConfig, folder: Path) -> tuple[ScoreTable, pl.DataFrame]:
    """``score_table.with_corpus`` after indexing ``config.corpus`` as a run does; its tables go into ``folder``.

    Raises:
        UsageError: it is no corpus.
        DataError: none of its videos can be read, or none is in the table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index_path, rejected_path = folder / "corpus_index.parquet", folder / "corpus_rejected.parquet"
    build_index(
        config.corpus,
        index_path=index_path,
        rejected_path=rejected_path,
        group_links_path=folder / "corpus_group_links.parquet",
        work_dir=Path(config.cache_dir) / "index",
        near_duplicate_bits=config.near_duplicate_bits,
        max_rejected_share=1.0,  # what the table does not score may be as broken as it likes
        workers=config.workers,
        allow_outside=config.allow_outside,
        label_map=config.label_map,
        unused_labels=True,  # some words may be the table's alone
    )
    return with_corpus(table, read_table(index_path, INDEX), used_for(read_table(rejected_path, REJECTED)))
