"""Additional results of a model on features: its gain over metadata, and the importance of feature families.

The importance of a family is the fall of the AUC when its values are permuted among the test videos of a fold
(L. Breiman, "Random forests", 2001). Families with the same information can replace each other, so they all look
unimportant. Importance is reported only; no choice depends on it.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import polars as pl

from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.classification import ANY_NUMBER, FloatArray
from fvc_lib.metrics.intervals import interval_ends, paired_difference, replicate_values
from fvc_lib.services.checkpoint_files import BEST, load_weights
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, command_text
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.tasks.video.controls import fake_labels, metadata_only, tested, trainings_of
from fvc_lib.tasks.video.results import families_of, forensic_features, measured, with_targets
from fvc_lib.tasks.video.selection import read_selection

_REPEATS = 10  # permutations of a family
_MOST_REPLICATES = 500

_FAMILIES = {
    "family": pl.String, "features": pl.Int64, "auc_lost": pl.Float64, "low": pl.Float64, "high": pl.Float64,
}  # fmt: skip
_BEYOND = {
    "compared": pl.String, "auc": pl.Float64, "auc_of_metadata": pl.Float64, "gain": pl.Float64, "low": pl.Float64,
    "high": pl.Float64, "p_value": pl.Float64,
}  # fmt: skip


@dataclass(frozen=True)
class FeatureResults:
    """Results that only a model on features has.

    Attributes:
        beyond: one row for the model and, for forensic features, one for a model of metadata and features. A row
            compares its AUC with that of metadata alone, on the same videos.
        families: ``family features auc_lost low high``, sorted by ``auc_lost`` with the largest first; empty for a
            trunk's features.
    """

    beyond: pl.DataFrame
    families: pl.DataFrame

    def sentences(self) -> str:
        """Return one sentence for each row of ``beyond``."""
        sentences = []
        for name, gain, low, high in self.beyond.select("compared", "gain", "low", "high").rows():
            if low is None:
                sentences.append(f"{name}: the gain over metadata alone has no interval.")
                continue
            relation = "is above" if low > 0 else "is below" if high < 0 else "is not shown to differ from"
            sentences.append(f"{name} {relation} metadata alone: AUC {gain:+.3f} [{low:+.3f}, {high:+.3f}].")
        return " ".join(sentences)


def feature_results(
    paths: RunPaths,
    config: RunConfig,
    index: pl.DataFrame,
    predictions: pl.DataFrame,
    *,
    protocol: pl.DataFrame | None = None,
    left_out: Collection[str] = (),
) -> FeatureResults | None:
    """Return the results of a run whose model sees features; None for a network.

    Args:
        paths: the run.
        config: its parameters.
        index: INDEX schema.
        predictions: PREDICTIONS of all folds.
        protocol: PROTOCOL schema; None: protocol ``kfold``.
        left_out: ids of videos that were in no part.

    Raises:
        DataError: the stored models do not give the stored predictions.
    """
    if not config.of_features:
        return None
    scored, trainings = with_targets(predictions.sort("video_id"), protocol), trainings_of(protocol, config, left_out)
    judged = scored.select("video_id", "group_id", "label", "fold")
    metadata = with_targets(tested(lambda rows: metadata_only(index, rows), judged, trainings), protocol)
    compared, families = {"The model": scored}, pl.DataFrame(schema=_FAMILIES)
    if config.of_features == "forensic":
        table = forensic_features(paths, config).drop("group_id")
        families = _family_importance(paths, config, scored, table)
        joint = tested(lambda rows: metadata_only(index, rows, further=table), judged, trainings)
        compared["Metadata with features"] = with_targets(joint, protocol)
    drawn = replicate_values(
        fake_labels(scored), [measured("roc_auc", each) for each in (metadata, *compared.values())],
        scored["group_id"].to_list(), replicates=config.bootstrap_replicates, seed=config.seed,
    )  # fmt: skip
    rows = []
    for number, name in enumerate(compared, start=1):
        gain = paired_difference(drawn, 0, number, confidence=config.confidence)
        aucs = (float(drawn.values[number]), float(drawn.values[0]))
        rows.append((name, *aucs, gain.value, gain.low, gain.high, gain.p_value))
    return FeatureResults(pl.DataFrame(rows, schema=_BEYOND, orient="row").fill_nan(None), families)


def _family_importance(paths: RunPaths, config: RunConfig, scored: pl.DataFrame, table: pl.DataFrame) -> pl.DataFrame:
    """Return the permutation importance of each family over all folds, with intervals over groups."""
    model = DETECTORS.get(config.model).build()  # type: ignore[misc]  # a model on features has it
    values = scored.select("video_id").join(table, on="video_id", how="left", maintain_order="left").drop("video_id")
    families, features = np.array([families_of(config)[name] for name in values.columns]), values.to_numpy()
    folds = []
    for fold in scored["fold"].unique().sort():
        folder = paths.fold_checkpoints(fold)
        recorded = read_selection(folder)
        if recorded is None or not (folder / BEST).is_file():
            raise DataError(f"{str(folder)!r}: fold {fold} has no model, or no record of its choices.")
        arrays = {name: tensor.numpy() for name, tensor in load_weights(folder / BEST).items()}
        folds.append((np.flatnonzero(scored["fold"] == fold), arrays, recorded.selection))

    def scores_of(features: FloatArray) -> FloatArray:
        scores = np.empty(len(features))
        for rows, arrays, chosen in folds:
            logits = model.logits(arrays, features[rows]) + chosen.prior_logit
            scores[rows] = probabilities(logits, chosen.temperature)
        return scores

    whole, generator = scores_of(features), np.random.default_rng([config.seed, 1])
    if not np.allclose(whole, scored["score"].to_numpy(), atol=1e-6):
        remedy = command_text("--force", "04", "--resume", paths.root)
        raise DataError(f"the stored models do not give the stored predictions. Fit them again: {remedy}")
    result = []
    for family in dict.fromkeys(families.tolist()):
        columns, scores = np.flatnonzero(families == family), [whole]
        for _ in range(_REPEATS):
            permuted = features.copy()
            for rows, _, _ in folds:
                permuted[np.ix_(rows, columns)] = features[np.ix_(generator.permutation(rows), columns)]
            scores.append(scores_of(permuted))
        drawn = replicate_values(
            fake_labels(scored), [measured("roc_auc", scored.with_columns(score=pl.Series(each))) for each in scores],
            scored["group_id"].to_list(), replicates=min(config.bootstrap_replicates, _MOST_REPLICATES),
            seed=config.seed,
        )  # fmt: skip
        value, lost = (each[:1] - each[1:].mean(0) for each in (drawn.values, drawn.replicates))
        low, high = interval_ends(value, lost, ANY_NUMBER, drawn.groups, config.confidence)
        result.append((family, len(columns), value[0], low[0], high[0]))
    frame = pl.DataFrame(result, schema=_FAMILIES, orient="row").fill_nan(None)
    return frame.sort("auc_lost", "family", descending=[True, False], nulls_last=True)
