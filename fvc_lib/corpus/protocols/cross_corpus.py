"""``cross_corpus``: trained on some corpora, tested on each of the others.

A target is tested on its official test list where it has one, else whole. What would cross is left out of training,
never of a test: training videos whose group (a source, a near-duplicate) has tested videos as well.
"""

from collections.abc import Sequence
from pathlib import PurePath

import polars as pl

from fvc_lib.corpus.corpus_files import some_of
from fvc_lib.services.errors import DataError, did_you_mean
from fvc_lib.services.tables import LABELS, LEFT_OUT

NOT_LISTED = "not in its corpus's official test list"
CROSSES = "its group is also tested"


def _known(name: str, corpora: Sequence[str]) -> str:
    """Return the corpus called ``name`` up to case and punctuation, else ``name``."""
    plain = {"".join(filter(str.isalnum, each.lower())): each for each in corpora}
    return plain.get("".join(filter(str.isalnum, name.lower())), name) if name not in corpora else name


def refused_targets(targets: Sequence[str], corpora: Sequence[str]) -> str:
    """Return why ``targets`` cannot be tested in a run of these ``corpora``, else the empty text."""
    listed = f"They are: {', '.join(corpora) or 'one without a name'}."
    for name in (_known(name, corpora) for name in targets):
        if name not in corpora:
            plain = _known(PurePath(name).name, corpora)
            by_name = f" {plain!r} is meant by its name, not by its path."
            near = by_name if plain in corpora else did_you_mean(name, corpora)
            return f"target_corpora: {name!r} is none of this run's corpora.{near} {listed}"
    if not set(corpora) - {_known(name, corpora) for name in targets}:
        return (
            f"target_corpora: {', '.join(targets)} are all of this run's corpora, and nothing is left to train on. "
            "Leave one out, or give another with -p more_corpora."
        )
    return ""


def cross_corpus(index: pl.DataFrame, targets: Sequence[str]) -> pl.DataFrame:
    """Return ``video_id group_id label fold target part reason`` of the one training, fold 0.

    Raises:
        DataError: a target that is none of the run's corpora, that lacks a label, or no corpus left to train on.
    """
    corpora = sorted(index["corpus"].drop_nulls().unique()) if "corpus" in index.columns else []
    targets = [_known(name, corpora) for name in targets]
    if why := refused_targets(targets, corpora):
        raise DataError(
            f"{why} In a new run with what is done of this one: --resume RUN --fork -p target_corpora NAME; other "
            "corpora's paths: -p more_corpora."
        )
    is_target = pl.col("corpus").is_in(list(targets)).fill_null(False)
    has_list = (pl.col("official_split") == "test").any().over("corpus")
    listed = (pl.col("official_split") == "test").fill_null(False)
    rows = index.sort("video_id").with_columns(
        part=pl.when(~is_target).then(pl.lit("train"))
        .when(listed | ~has_list.fill_null(False)).then(pl.lit("test"))
        .otherwise(pl.lit(LEFT_OUT)),
        target=pl.when(is_target).then("corpus"),
    )  # fmt: skip
    for name in targets:
        tested = set(rows.filter((pl.col("part") == "test") & (pl.col("target") == name))["label"])
        if lacking := [label for label in LABELS if label not in tested]:
            raise DataError(
                f"target_corpora: {name!r} has no {some_of(lacking)} videos to test on, so nothing can be told apart "
                "there. Add them (a manifest of both), or leave it out."
            )
    crosses = (pl.col("part") == "train") & (pl.col("part") == "test").any().over("group_id")
    return rows.select(
        "video_id",
        "group_id",
        "label",
        fold=pl.lit(0, pl.Int64),
        target=pl.when(pl.col("part") == "test").then("target"),
        part=pl.when(crosses).then(pl.lit(LEFT_OUT)).otherwise("part"),
        reason=pl.when(crosses).then(pl.lit(CROSSES)).when(pl.col("part") == LEFT_OUT).then(pl.lit(NOT_LISTED)),
    )
