#!/usr/bin/env python3
"""How well detectors on features tell real from fake: within a corpus, across its sources, and from corpus to corpus.

Every number stands next to FVC's metadata control on the same videos, with the paired difference. Folds are made with
each seed; a cell shows the mean over seeds, the interval over groups of the first seed, and the range of the seeds.

    python -m benchmarks.strength media/clips/manifest.csv media/labelled --source-column collection
        [--models probe:efficientnet_lite0,forensic_svm] [--seeds 4] [--without overlay=yes] [-p crop face]
        [--json FILE]

Sources are the values of ``--source-column``, a column of the manifest. ``--without COLUMN=VALUE`` leaves videos out.
``-p NAME VALUE`` sets a parameter of runs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import torch

from fvc_lib.corpus.folds import make_folds
from fvc_lib.corpus.index import build_index
from fvc_lib.corpus.protocols import source_expression
from fvc_lib.metrics.cross_validation import measure_over_folds
from fvc_lib.metrics.intervals import paired_difference, replicate_values
from fvc_lib.services.config import RunConfig
from fvc_lib.services.tables import AUGMENTED, FEATURES, INDEX, read_table
from fvc_lib.tasks.video import classical, controls
from fvc_lib.tasks.video.data import clip_rows, made_clips, rows_to_fit
from fvc_lib.tasks.video.features import with_features
from fvc_lib.tasks.video.results import MODEL, forensic_features, scores_across_sources
from fvc_lib.video.clips.making import make_clips
from fvc_lib.video.clips.store import ClipStore
from fvc_lib.video.features.measuring import measure_features

NUM_FOLDS = 5


@dataclass(frozen=True)
class Corpus:
    """A corpus with the features of its videos; ``everything`` is one FOLDS table in which all are of fold 0."""

    name: str
    index: pl.DataFrame
    source: classical.Source
    everything: pl.DataFrame


def read_corpus(path: Path, config: RunConfig, without: Sequence[tuple[str, str]]) -> Corpus:
    """Index the corpus at ``path``, decode its videos and compute the features of ``config.model``."""
    with tempfile.TemporaryDirectory() as tables:
        build_index(path, config, tables)
        index = read_table(Path(tables) / "index.parquet", INDEX)
        for column, value in without:
            index = index.filter(source_expression(index, column).ne_missing(value))
        root = path if path.is_dir() else path.parent
        source: classical.Source
        if config.of_features == "forensic":
            measured = Path(tables) / "features.parquet"
            measure_features(index, root, config.feature_families, config.cache_dir, measured)
            assert read_table(measured, FEATURES).height
            source = classical.FeatureTable(forensic_features(measured, config), config)
        else:
            store = ClipStore.of(config)
            make_clips(store, index, root, 0, Path(tables) / "augmented.csv")
            made = made_clips(read_table(Path(tables) / "augmented.csv", AUGMENTED))
            device = torch.device("cpu")
            source = classical.EmbeddedClips(
                with_features(store, made, config, device, begin=0.0, stop=lambda: False), config
            )
    index = index.filter([source.has(name, 0) for name in index["video_id"]]).sort("video_id")
    everything = index.select("video_id", "group_id", "label", fold=pl.lit(0, pl.Int64))
    return Corpus(path.parent.name if path.is_file() else path.name, index, source, everything)


def from_corpus_to_corpus(config: RunConfig, trained: Corpus, tested: Corpus) -> dict[str, pl.DataFrame]:
    """Return the scores of ``tested`` by a model and a metadata control that learned ``trained``."""
    fitted = rows_to_fit(trained.everything, trained.source, config)
    arrays = classical.fitted_arrays(config, trained.source, fitted)
    logits = classical.model_of(config).logits(arrays, tested.source.of(clip_rows(tested.everything)))
    both = pl.concat([tested.everything, trained.everything.with_columns(fold=pl.lit(1, pl.Int64))])
    both = both.unique("video_id", keep="first", maintain_order=True).sort("video_id")
    index = pl.concat([trained.index, tested.index]).unique("video_id", keep="last")
    metadata = controls.metadata_only(index, both).filter(fold=0)
    return {MODEL: tested.everything.with_columns(score=pl.Series(logits)), controls.METADATA_ONLY: metadata}


def cell(scored: Sequence[dict[str, pl.DataFrame]]) -> dict[str, float | int]:
    """Return AUCs of model and metadata and their difference, from the two score tables of every seed."""
    values: list[list[float]] = []
    for number, tables in enumerate(scored):
        first = tables[MODEL]
        measures = [
            measure_over_folds("roc_auc", table["score"].to_numpy(), 0.5, table["fold"].to_numpy())
            for table in (tables[controls.METADATA_ONLY], first)
        ]
        labels = controls.fake_labels(first)
        values.append([float(metric(labels, values)) for metric, values in measures])
        if number == 0:
            drawn = replicate_values(labels, measures, first["group_id"].to_list(), replicates=2000, seed=0)
            difference = paired_difference(drawn, 0, 1)
            interval = controls.auc_within_folds(first, RunConfig(bootstrap_replicates=2000))
    metadata, model = np.array(values).T
    return {
        "videos": first.height, "groups": first["group_id"].n_unique(), "auc": float(model.mean()),
        "low": interval.low, "high": interval.high, "lowest": float(model.min()), "highest": float(model.max()),
        "metadata": float(metadata.mean()), "difference": difference.value, "difference_low": difference.low,
        "difference_high": difference.high,
    }  # fmt: skip


def rows_of(config: RunConfig, corpora: Sequence[Corpus], num_seeds: int) -> dict[str, dict[str, float | int]]:
    """Return the cells of one model by the name of the trial."""
    rows: dict[str, dict[str, float | int]] = {}

    def over_seeds(made: Callable[[RunConfig], dict[str, pl.DataFrame]]) -> list[dict[str, pl.DataFrame]]:
        found = [made(config.model_copy(update={"seed": seed})) for seed in range(num_seeds)]
        return [tables for tables in found if tables]

    for corpus in corpora:

        def folded(seeded: RunConfig, corpus: Corpus = corpus) -> dict[str, pl.DataFrame]:
            folds = make_folds(corpus.index, NUM_FOLDS, seeded.seed)
            model = classical.out_of_fold_logits(seeded, corpus.source, folds)
            return {MODEL: model, controls.METADATA_ONLY: controls.metadata_only(corpus.index, folds)}

        def across(seeded: RunConfig, corpus: Corpus = corpus) -> dict[str, pl.DataFrame]:
            return scores_across_sources(
                corpus.index, corpus.everything, seeded,
                lambda folds: classical.out_of_fold_logits(seeded, corpus.source, folds),
            )  # fmt: skip

        by_group = over_seeds(folded)
        rows[f"{corpus.name}, by group"] = cell(by_group)
        stated = corpus.index.select("video_id", kind=pl.col("manipulation"))
        named = ("swap", "face", "lip", "talking")
        is_face = pl.any_horizontal(pl.col("kind").str.to_lowercase().str.contains(word) for word in named)
        faces = stated.filter(is_face.fill_null(value=False) | pl.col("kind").is_null())["video_id"]
        if by_source := over_seeds(across):
            rows[f"{corpus.name}, by source"] = cell(by_source)
            if faces.len() < corpus.index.height:
                only = [
                    {name: table.filter(pl.col("video_id").is_in(faces.implode())) for name, table in tables.items()}
                    for tables in by_source
                ]
                rows[f"{corpus.name}, by source, faces and all reals"] = cell(only)
        for other in corpora:
            if other is not corpus:
                rows[f"{corpus.name} -> {other.name}"] = cell([from_corpus_to_corpus(config, corpus, other)])
    return rows


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
    print("| model | trial | videos, groups | AUC [interval], seeds | metadata | difference, paired |")
    print("|---|---|---|---|---|---|")
    for model in args.models.split(","):
        config = RunConfig(model=model, source_column=args.source_column, num_folds=NUM_FOLDS, **dict(args.p))
        corpora = [read_corpus(path, config, without) for path in args.corpora]
        found[model] = rows_of(config, corpora, args.seeds)
        for name, row in found[model].items():
            print(
                f"| `{model}` | {name} | {row['videos']}, {row['groups']} | {row['auc']:.3f} [{row['low']:.2f}, "
                f"{row['high']:.2f}], {row['lowest']:.3f} to {row['highest']:.3f} | {row['metadata']:.3f} | "
                f"{row['difference']:+.3f} [{row['difference_low']:+.2f}, {row['difference_high']:+.2f}] |",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
