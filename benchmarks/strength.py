#!/usr/bin/env python3
"""How well detectors on features tell real from fake: within a corpus, across its sources, and from corpus to corpus.

Every number stands next to FVC's metadata control and next to the former default detector on the same videos and
folds, with the paired differences. Folds are made with each seed; a cell shows the mean over seeds, the interval over
groups of the first seed, and the range of the seeds.

    python -m benchmarks.strength media/clips/manifest.csv media/labelled --source-column collection
        [--models probe:efficientnet_lite0,forensic_svm] [--seeds 4] [--without overlay=yes] [-p crop face]
        [--json FILE]

Sources are the values of ``--source-column``, a column of the manifest. A row "within" a source takes the scores by
group of its videos; the source needs five groups of each label. ``--without COLUMN=VALUE`` leaves videos out.
``-p NAME VALUE`` sets a parameter of runs.

The former default is a linear head on the last features of a frozen efficientnet_lite0. AdamW trains it, and a quarter
of the training groups chooses the epoch. It sees the same centre crops as the probe.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from fvc_lib.corpus.folds import TrainingRows, make_folds
from fvc_lib.corpus.index import build_index
from fvc_lib.corpus.protocols import source_expression
from fvc_lib.engine.device import resolve_device
from fvc_lib.engine.loop import Engine
from fvc_lib.engine.training_state import NoMetrics
from fvc_lib.metrics.classification import FloatArray
from fvc_lib.metrics.cross_validation import measure_over_folds
from fvc_lib.metrics.intervals import paired_difference, replicate_values
from fvc_lib.services.checkpoint_files import CheckpointBinding, CheckpointFolder
from fvc_lib.services.config import RunConfig
from fvc_lib.services.tables import AUGMENTED, FEATURES, INDEX, read_table
from fvc_lib.tasks.video import classical, controls
from fvc_lib.tasks.video.data import (
    ClipDataset,
    ClipRow,
    class_weights,
    clip_rows,
    fold_clips,
    made_clips,
    rows_to_fit,
)
from fvc_lib.tasks.video.features import with_features
from fvc_lib.tasks.video.results import MODEL, forensic_features, scores_across_sources, within_sources
from fvc_lib.tasks.video.training import BinaryScores, VideoTask, engine_settings
from fvc_lib.video.clips.making import make_clips
from fvc_lib.video.clips.store import ClipStore
from fvc_lib.video.features.measuring import measure_features

NUM_FOLDS = 5
FORMER = "former default"
FORMER_SETTINGS = {"model": "efficientnet_lite0", "inner_validation_share": 0.25, "augmentations_per_video": 0}
Scores = dict[str, pl.DataFrame]  # FOLDS tables with ``score``, by the name of the predictor


@dataclass(frozen=True)
class Corpus:
    """A corpus with the features of its videos; ``everything`` is one FOLDS table in which all are of fold 0."""

    name: str
    index: pl.DataFrame
    source: Any
    everything: pl.DataFrame


def read_corpus(path: Path, config: RunConfig, without: Sequence[tuple[str, str]]) -> Corpus:
    """Index the corpus at ``path``, decode its videos and compute the features of ``config.model``."""
    with tempfile.TemporaryDirectory() as tables:
        build_index(path, config, tables)
        index = read_table(Path(tables) / "index.parquet", INDEX)
        for column, value in without:
            index = index.filter(source_expression(index, column).ne_missing(value))
        root = path if path.is_dir() else path.parent
        source: Any = None
        forensic: Any = None
        if config.of_features in ("forensic", "both"):
            measured = Path(tables) / "features.parquet"
            families, cache = config.feature_families, config.cache_dir
            measure_features(index, root, families, cache, measured, recipe=config.recipe)
            assert read_table(measured, FEATURES).height
            source = forensic = classical.FeatureTable(forensic_features(measured, config), config)
        if config.of_features != "forensic":
            store = ClipStore.of(config)
            make_clips(store, index, root, 0, Path(tables) / "augmented.csv")
            made = made_clips(read_table(Path(tables) / "augmented.csv", AUGMENTED))
            device = torch.device("cpu")
            source = with_features(store, made, config, device, begin=0.0, stop=lambda: False)
            if config.of_features:
                source = classical.EmbeddedClips(source, config)
            if forensic is not None:
                source = classical.Views(source, forensic)
    index = index.filter([source.has(name, 0) for name in index["video_id"]]).sort("video_id")
    everything = index.select("video_id", "group_id", "label", fold=pl.lit(0, pl.Int64))
    return Corpus(path.parent.name if path.is_file() else path.name, index, source, everything)


def train_network(
    config: RunConfig, source: Any, folds: pl.DataFrame, fold: int | None
) -> Callable[[Any, Sequence[ClipRow]], FloatArray]:
    """Train the network of ``config`` without ``fold``, and return a function that scores rows of a source."""
    clips = fold_clips(TrainingRows(folds), source, config, fold)
    train, validation = ClipDataset(source, clips.train, draws=True), ClipDataset(source, clips.validation)
    task = VideoTask(train, validation, config=config, weights=class_weights(clips.train))
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = CheckpointFolder(Path(folder), CheckpointBinding({}, clips.fingerprint))
        engine = Engine(task, engine_settings(config, fold), resolve_device("cpu"), checkpoints, NoMetrics())
        weights = engine.fit().best_model

    def logits(of: Any, rows: Sequence[ClipRow]) -> FloatArray:
        scores = BinaryScores()
        engine.predict(ClipDataset(of, rows), weights, scores)
        return scores.logits

    return logits


def out_of_fold_logits(config: RunConfig, source: Any, folds: pl.DataFrame) -> pl.DataFrame:
    """Return ``folds`` with ``score``: the logit of a model or network that was trained on the other folds."""
    if config.of_features:
        return classical.out_of_fold_logits(config, source, folds)
    scored = []
    for fold in range(folds["fold"].max() + 1):
        tested = folds.filter(fold=fold)
        logits = train_network(config, source, folds, fold)(source, clip_rows(tested))
        scored.append(tested.with_columns(score=pl.Series(logits)))
    return pl.concat(scored).sort("video_id")


def from_corpus_to_corpus(config: RunConfig, trained: Corpus, tested: Corpus) -> pl.DataFrame:
    """Return the scores of ``tested`` by a model or network that learned ``trained``."""
    rows = clip_rows(tested.everything)
    if config.of_features:
        found = classical.fitted(config, trained.source, rows_to_fit(trained.everything, trained.source, config))
        logits = classical.logits_of(config, found.arrays, tested.source.of(rows))
    else:
        logits = train_network(config, trained.source, trained.everything, None)(tested.source, rows)
    return tested.everything.with_columns(score=pl.Series(logits))


def metadata_from_corpus_to_corpus(trained: Corpus, tested: Corpus) -> pl.DataFrame:
    """Return the scores of ``tested`` by a metadata control that learned ``trained``."""
    both = pl.concat([tested.everything, trained.everything.with_columns(fold=pl.lit(1, pl.Int64))])
    both = both.unique("video_id", keep="first", maintain_order=True).sort("video_id")
    index = pl.concat([trained.index, tested.index]).unique("video_id", keep="last")
    return controls.metadata_only(index, both).filter(fold=0)


def cell(scored: Sequence[Scores]) -> dict[str, float | int]:
    """Return the AUCs of all predictors and the model's paired differences, from the score tables of every seed."""
    names = [MODEL, controls.METADATA_ONLY, FORMER]
    values: list[list[float]] = []
    for number, tables in enumerate(scored):
        first = tables[MODEL]
        measures = [
            measure_over_folds("roc_auc", tables[name]["score"].to_numpy(), 0.5, tables[name]["fold"].to_numpy())
            for name in names
        ]
        labels = controls.fake_labels(first)
        values.append([float(metric(labels, values)) for metric, values in measures])
        if number == 0:
            drawn = replicate_values(labels, measures, first["group_id"].to_list(), replicates=2000, seed=0)
            to_metadata, to_former = paired_difference(drawn, 1, 0), paired_difference(drawn, 2, 0)
            interval = controls.auc_within_folds(first, RunConfig(bootstrap_replicates=2000))
    model, metadata, former = np.array(values).T
    return {
        "videos": first.height, "groups": first["group_id"].n_unique(), "auc": float(model.mean()),
        "low": interval.low, "high": interval.high, "lowest": float(model.min()), "highest": float(model.max()),
        "metadata": float(metadata.mean()), "former": float(former.mean()),
        **{f"{name}_{end}": getattr(of, end) for name, of in (("difference", to_metadata), ("to_former", to_former))
           for end in ("value", "low", "high")},
    }  # fmt: skip


def rows_of(config: RunConfig, corpora: Sequence[tuple[Corpus, Corpus]], num_seeds: int) -> dict[str, dict[str, Any]]:
    """Return the cells of one model by the name of the trial.

    Args:
        config: names the model.
        corpora: every corpus with the features of the model, and with those of the former default.
        num_seeds: number of seeds of the folds.
    """
    rows: dict[str, dict[str, Any]] = {}
    earlier = config.model_copy(update=FORMER_SETTINGS)

    def by_seed(corpus: Corpus, former: Corpus, seed: int) -> tuple[Scores, Scores]:
        """Return scores for folds of groups, and for folds of sources (empty without sources)."""
        seeded, old = (one.model_copy(update={"seed": seed}) for one in (config, earlier))
        folds = make_folds(corpus.index, NUM_FOLDS, seed)
        by_group = {
            MODEL: out_of_fold_logits(seeded, corpus.source, folds),
            controls.METADATA_ONLY: controls.metadata_only(corpus.index, folds),
            FORMER: out_of_fold_logits(old, former.source, folds),
        }
        across = scores_across_sources(
            corpus.index, corpus.everything, seeded, lambda folds: out_of_fold_logits(seeded, corpus.source, folds)
        )
        if across:
            folds = across[MODEL].drop("score")
            across[FORMER] = out_of_fold_logits(old, former.source, folds)
        return by_group, across

    for corpus, former in corpora:
        by_group, across = zip(*(by_seed(corpus, former, seed) for seed in range(num_seeds)), strict=True)
        rows[f"{corpus.name}, by group"] = cell(by_group)
        for scope, ids in within_sources(corpus.index, by_group[0][MODEL], config.source_column).items():
            rows[f"{corpus.name}, by group, within {scope}"] = cell([only(tables, ids) for tables in by_group])
        if all(across):
            rows[f"{corpus.name}, by source"] = cell(across)
            kinds = corpus.index.select("video_id", kind=pl.col("manipulation").str.to_lowercase())
            named = [pl.col("kind").str.contains(word) for word in ("swap", "face", "lip", "talking")]
            faces = kinds.filter(pl.any_horizontal(named).fill_null(value=False) | pl.col("kind").is_null())
            if faces.height < corpus.index.height:
                rows[f"{corpus.name}, by source, faces and all reals"] = cell([only(one, faces) for one in across])
        for other, other_former in corpora:
            if other is not corpus:
                scores = {
                    MODEL: from_corpus_to_corpus(config, corpus, other),
                    controls.METADATA_ONLY: metadata_from_corpus_to_corpus(corpus, other),
                    FORMER: from_corpus_to_corpus(earlier, former, other_former),
                }
                rows[f"{corpus.name} -> {other.name}"] = cell([scores])
    return rows


def only(tables: Scores, ids: pl.DataFrame) -> Scores:
    """Return the scores of the videos in ``ids`` (column ``video_id``)."""
    return {name: table.join(ids, on="video_id", how="semi", maintain_order="left") for name, table in tables.items()}


def main() -> None:
    """Measure and print a table in Markdown; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", nargs="+", type=Path, metavar="MANIFEST", help="manifests or folders")
    parser.add_argument("--models", default=RunConfig().model, help="models on features, separated by commas")
    parser.add_argument("--source-column", default="corpus", help="column of the manifest that names sources")
    parser.add_argument("--without", action="append", default=[], metavar="COLUMN=VALUE", help="videos to leave out")
    parser.add_argument("--seeds", type=int, default=4, help="number of seeds of the folds (default: 4)")
    parser.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="parameter of runs")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    args = parser.parse_args()
    without = [tuple(text.split("=", 1)) for text in args.without]
    found = {}
    print("| model | trial | videos, groups | AUC [interval], seeds | metadata | difference | former | difference |")
    print("|---|---|---|---|---|---|---|---|")
    for model in args.models.split(","):
        config = RunConfig(model=model, source_column=args.source_column, num_folds=NUM_FOLDS, **dict(args.p))
        earlier = config.model_copy(update=FORMER_SETTINGS)
        corpora = [[read_corpus(path, one, without) for one in (config, earlier)] for path in args.corpora]
        found[model] = rows_of(config, corpora, args.seeds)
        for name, row in found[model].items():
            print(
                f"| `{model}` | {name} | {row['videos']}, {row['groups']} | {row['auc']:.3f} [{row['low']:.2f}, "
                f"{row['high']:.2f}], {row['lowest']:.3f} to {row['highest']:.3f} | {row['metadata']:.3f} | "
                f"{row['difference_value']:+.3f} [{row['difference_low']:+.2f}, {row['difference_high']:+.2f}] | "
                f"{row['former']:.3f} | "
                f"{row['to_former_value']:+.3f} [{row['to_former_low']:+.2f}, {row['to_former_high']:+.2f}] |",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
