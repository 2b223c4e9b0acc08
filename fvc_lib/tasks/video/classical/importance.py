"""What the models on features of a run relied on, and what features add to what metadata tells.

All of it is read off the stored models and the test videos of their own folds: nothing is chosen by it.

- A family's importance is how much the AUC falls when its values are dealt out anew among the test videos of a fold,
  the mean of ten dealings (L. Breiman, "Random forests", 2001). Families that tell the same stand in for each other:
  both then look unimportant.
- Partial dependence is the mean score when one feature is set to a value in all test videos (J. Friedman, 2001).
- A feature that differs between two sources of real videos is a trace of the corpus: no forgery is needed for it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from fvc_lib.detectors.classical.model import Part
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.metrics.classification import ANY_NUMBER, FloatArray, roc_auc
from fvc_lib.metrics.intervals import ReplicateValues, group_interval, interval_ends, replicate_values
from fvc_lib.metrics.paired_difference import paired_difference
from fvc_lib.services.checkpoint_files import BEST, load_weights
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, command_text
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import FEATURES, LABELS, read_table
from fvc_lib.services.tasks import KFOLD
from fvc_lib.tasks.video.classical.table import KEYS, described_features, read_features
from fvc_lib.tasks.video.controls import fake_labels, metadata_only, split_by_row, tested, trainings_of
from fvc_lib.tasks.video.real_sources import two_largest_sources
from fvc_lib.tasks.video.results import measured, with_targets
from fvc_lib.tasks.video.selection import read_selection

_DEALINGS, _SINGLE_DEALINGS = 10, 3
_FAMILIES_LOOKED_INTO = 3
SHOWN_FEATURES, SHOWN_CURVES = 12, 4
_GRID = np.linspace(0.05, 0.95, 15)
_MOST_REPLICATES = 500

_FAMILIES = {
    "family": pl.String, "features": pl.Int64, "auc_lost": pl.Float64, "low": pl.Float64, "high": pl.Float64,
}  # fmt: skip
_STRONGEST = {
    "feature": pl.String, "family": pl.String, "auc_lost": pl.Float64, "auc_of_two_real_sources": pl.Float64,
    "low": pl.Float64, "high": pl.Float64, "note": pl.String, "unit": pl.String, "meaning": pl.String,
}  # fmt: skip
_CURVES = {"feature": pl.String, "unit": pl.String, "fold": pl.Int64, "value": pl.Float64, "score": pl.Float64}
_BEYOND = {
    "compared": pl.String, "auc": pl.Float64, "auc_of_metadata": pl.Float64, "gain": pl.Float64, "low": pl.Float64,
    "high": pl.Float64, "p_value": pl.Float64,
}  # fmt: skip


@dataclass(frozen=True)
class FeaturesTold:
    """What there is to show of a run's models on features; frames are empty where a model sees unnamed features.

    Attributes:
        families: ``family features auc_lost low high``, the most important first.
        strongest: single features, each dealt out alone: ``auc_lost`` is what that costs.
        curves: partial dependence of the first of them, by fold.
        beyond: the model, and metadata with features, each over metadata alone, on the same videos.
        two_sources: the two sources of reals; empty where there are no two.
    """

    families: pl.DataFrame
    strongest: pl.DataFrame
    curves: pl.DataFrame
    beyond: pl.DataFrame
    two_sources: tuple[str, ...] = ()

    def sentences(self) -> str:
        """What the numbers say."""
        return " ".join(_gain_sentence(*row) for row in self.beyond.select("compared", "gain", "low", "high").rows())

    def caption(self) -> str:
        """Of the table of single features."""
        if self.families.is_empty():
            return "A trunk's features have no names: none is shown by itself"
        of = f"; the AUC of real videos of {' and '.join(self.two_sources)}" if self.two_sources else ""
        alone = (
            f"What the AUC loses when one feature is dealt out alone, in the {_FAMILIES_LOOKED_INTO} strongest families"
        )
        unknown = "" if self.two_sources else "; there are no two sources of reals to tell corpus traces by"
        return f"{alone}{of}{unknown}"


def _gain_sentence(what: str, gain: float | None, low: float | None, high: float | None) -> str:
    if gain is None or low is None or high is None:
        return f"{what}: the AUC of one of the two is undefined."
    said = "is above" if low > 0 else "is below" if high < 0 else "is not shown to differ from"
    return f"{what} {said} metadata alone: AUC {gain:+.3f} [{low:+.3f}, {high:+.3f}]."


def features_told(
    paths: RunPaths,
    config: RunConfig,
    index: pl.DataFrame,
    predictions: pl.DataFrame,
    *,
    protocol: pl.DataFrame | None = None,
    left_out: Collection[str] = (),
) -> FeaturesTold | None:
    """Of a run whose model sees features; None of a network.

    Args:
        paths: the run.
        config: its parameters.
        index: INDEX schema.
        predictions: PREDICTIONS of all folds.
        protocol: PROTOCOL schema; None: that of ``kfold``.
        left_out: videos that took no part.

    Raises:
        DataError: a stored model does not give the predictions.
    """
    if not config.of_features:
        return None
    scored = with_targets(predictions.sort("video_id"), protocol)
    if config.of_features != "forensic":
        beyond = _beyond_metadata(paths, config, index, scored, protocol, left_out)
        families, strongest, curves = (pl.DataFrame(schema=each) for each in (_FAMILIES, _STRONGEST, _CURVES))
        return FeaturesTold(families, strongest, curves, beyond)
    models = _StoredModels(paths, config, scored)
    beyond = _beyond_metadata(paths, config, index, scored, protocol, left_out)
    families = models.families()
    reals = predictions.filter(pl.col("label") == LABELS[0]).join(
        index.select("video_id", "real_source"), on="video_id", how="left"
    )
    try:
        sources: tuple[str, ...] = two_largest_sources(reals)
    except DataError:
        sources = ()
    ranked = models.single(families["family"].head(_FAMILIES_LOOKED_INTO).to_list())
    strongest = _described(models, ranked[:SHOWN_FEATURES], reals, sources, config)
    curves = models.curves(strongest["feature"].head(SHOWN_CURVES).to_list())
    return FeaturesTold(families, strongest, curves, beyond, sources)


def fitted_by_row(paths: RunPaths, config: RunConfig, predictions: pl.DataFrame) -> pl.DataFrame | None:
    """Scores of the run's model where videos, not groups, are dealt into folds: what a careless split would claim.

    Fold by fold the settings that were chosen for it are fitted anew, to the labels that the run had. None of a
    network, which would have to be trained anew, of a frozen trunk, and of a protocol with parts of its own.

    Args:
        paths: the run.
        config: its parameters.
        predictions: PREDICTIONS of all folds.

    Returns:
        ``video_id group_id label fold score``, the score not calibrated.
    """
    if config.of_features != "forensic" or config.protocol != KFOLD or predictions["fold"].n_unique() < 2:
        return None
    rows = split_by_row(predictions.select("video_id", "group_id", "label", "fold"), seed=config.seed)
    table, model = read_features(paths, config), DETECTORS.get(config.model).build()  # type: ignore[misc]
    places = {video_id: place for place, video_id in enumerate(table.videos)}
    values = table.values[[places[video_id] for video_id in rows["video_id"]]]
    labels, groups, dealt = fake_labels(rows), rows["group_id"].to_numpy(), rows["fold"].to_numpy()
    every, scores = Part(values, labels, np.ones(len(labels)), groups, config.seed), np.empty(len(labels))
    for fold in np.unique(dealt):
        chosen, test = read_selection(paths.fold_checkpoints(fold)), dealt == fold
        settings = (chosen.selection.settings if chosen else None) or model.candidates(int((~test).sum()))[0]
        scores[test] = probabilities(model.logits(model.fit(every.only(~test), settings), values[test]), 1.0)
    return rows.with_columns(score=pl.Series(scores))


class _StoredModels:
    """Every fold's model and the features of the videos that it was tested on, in the order of ``scored``."""

    def __init__(self, paths: RunPaths, config: RunConfig, scored: pl.DataFrame) -> None:
        self.config, self.scored = config, scored
        self.table = read_features(paths, config)
        places = {video_id: place for place, video_id in enumerate(self.table.videos)}
        self.values = self.table.values[[places[video_id] for video_id in scored["video_id"]]]
        self.families_of = np.array(self.table.families)
        self._model = DETECTORS.get(config.model).build()  # type: ignore[misc]  # a model on features has it
        self._folds = []
        for fold in scored["fold"].unique().sort():
            rows, chosen = np.flatnonzero(scored["fold"] == fold), read_selection(paths.fold_checkpoints(fold))
            path = paths.fold_checkpoints(fold) / BEST
            if chosen is None or not path.is_file():
                raise DataError(f"{str(path)!r}: fold {fold} has no model, or no record of what was chosen for it.")
            arrays = {name: each.numpy() for name, each in load_weights(path).items()}
            self._folds.append((int(fold), rows, arrays, chosen.selection))
        given = scored["score"].to_numpy()
        if not np.allclose(self.scores(self.values), given, atol=1e-6):
            anew = command_text("--force", "04", "--resume", paths.root)
            raise DataError(f"the stored models do not give the stored predictions. Fit them again: {anew}")
        labels, groups = fake_labels(scored), scored["group_id"].to_list()
        replicates = min(config.bootstrap_replicates, _MOST_REPLICATES)

        def drawn(scores: Sequence[FloatArray]) -> ReplicateValues:
            measures = [measured("roc_auc", scored.with_columns(score=pl.Series(each))) for each in scores]
            return replicate_values(labels, measures, groups, replicates=replicates, seed=config.seed)

        self._drawn: Callable[[Sequence[FloatArray]], ReplicateValues] = drawn

    def scores(self, values: FloatArray, folds: Collection[int] | None = None) -> FloatArray:
        """Float64 (N,) calibrated, of ``values`` (N, F), each video by its own fold's model."""
        found = np.full(len(values), np.nan)
        for fold, rows, arrays, chosen in self._folds:
            if folds is None or fold in folds:
                logits = self._model.logits(arrays, values[rows]) + chosen.prior_logit
                found[rows] = probabilities(logits, chosen.temperature)
        return found

    def _dealt(self, columns: npt.NDArray[np.int64], generator: np.random.Generator) -> FloatArray:
        """Scores with ``columns`` dealt out anew, together, among the videos of each fold."""
        values = self.values.copy()
        for _, rows, _, _ in self._folds:
            values[np.ix_(rows, columns)] = self.values[np.ix_(generator.permutation(rows), columns)]
        return self.scores(values)

    def families(self) -> pl.DataFrame:
        """Importance of each family, with intervals over groups."""
        generator, rows = np.random.default_rng([self.config.seed, 1]), []
        whole = self.scores(self.values)
        for family in dict.fromkeys(self.table.families):
            columns = np.flatnonzero(self.families_of == family)
            dealt = [self._dealt(columns, generator) for _ in range(_DEALINGS)]
            drawn = self._drawn([whole, *dealt])
            value, lost = (each[:1] - each[1:].mean(0) for each in (drawn.values, drawn.replicates))
            low, high = interval_ends(value, lost, ANY_NUMBER, drawn.groups, self.config.confidence)
            rows.append((family, len(columns), value[0], low[0], high[0]))
        frame = pl.DataFrame(rows, schema=_FAMILIES, orient="row").fill_nan(None)
        return frame.sort("auc_lost", "family", descending=[True, False], nulls_last=True)

    def single(self, families: Collection[str]) -> list[tuple[str, float]]:
        """Columns of ``families`` with what the AUC loses when each is dealt out alone, the most first."""
        generator = np.random.default_rng([self.config.seed, 2])
        metric, whole = measured("roc_auc", self.scored)
        labels, found = fake_labels(self.scored), list[tuple[str, float]]()
        before = metric(labels, whole)
        for column in np.flatnonzero(np.isin(self.families_of, list(families))):
            aucs = []
            for _ in range(_SINGLE_DEALINGS):
                dealt = self._dealt(np.array([column]), generator)
                of_dealt, values = measured("roc_auc", self.scored.with_columns(score=pl.Series(dealt)))
                aucs.append(of_dealt(labels, values))
            found.append((self.table.names[column], round(float(before - np.mean(aucs)), 9)))
        return sorted(found, key=lambda each: (-each[1], each[0]))

    def curves(self, features: Sequence[str]) -> pl.DataFrame:
        """Mean score of each fold's test videos with one feature set to values between its 5th and 95th percentile."""
        rows, described = [], described_features()
        for name in features:
            column = self.table.names.index(name)
            known = self.values[:, column][~np.isnan(self.values[:, column])]
            for value in np.unique(np.quantile(known, _GRID)).tolist():
                values = self.values.copy()
                values[:, column] = value
                scores = self.scores(values)
                rows += [
                    (name, described[name][1].unit, fold, value, float(scores[of].mean()))
                    for fold, of, _, _ in self._folds
                ]
        return pl.DataFrame(rows, schema=_CURVES, orient="row")


def _described(
    models: _StoredModels,
    ranked: Sequence[tuple[str, float]],
    reals: pl.DataFrame,
    sources: tuple[str, ...],
    config: RunConfig,
) -> pl.DataFrame:
    """What each feature is, and whether it tells two sources of reals apart; intervals share their error."""
    rows, described = [], described_features()
    both = reals.filter(pl.col("real_source").is_in(sources)).sort("video_id")
    place = {video_id: number for number, video_id in enumerate(models.table.videos)}
    of_both = models.table.values[[place[video_id] for video_id in both["video_id"]]]
    is_second = (both["real_source"] == sources[-1]).cast(pl.Int64).to_numpy() if sources else np.empty(0, np.int64)
    confidence = 1 - (1 - config.confidence) / max(1, len(ranked))
    for name, lost in ranked:
        family, feature = described[name]
        values = of_both[:, models.table.names.index(name)]
        known = ~np.isnan(values)
        found: tuple[float | None, ...] = (None, None, None)
        if len(set(is_second[known].tolist())) == 2:
            found = group_interval(
                is_second[known], values[known], both.filter(pl.Series(known))["group_id"].to_list(), roc_auc,
                replicates=config.bootstrap_replicates, seed=config.seed, confidence=confidence,
            ).row()[:3]  # fmt: skip
        _, low, high = found
        notes = ["corpus trace"] if low is not None and high is not None and not low <= 0.5 <= high else []
        notes += ["size proxy"] if feature.size_proxy else []
        rows.append((name, family, lost, *found, ", ".join(notes), feature.unit, feature.meaning))
    return pl.DataFrame(rows, schema=_STRONGEST, orient="row")


def _beyond_metadata(
    paths: RunPaths,
    config: RunConfig,
    index: pl.DataFrame,
    scored: pl.DataFrame,
    protocol: pl.DataFrame | None,
    left_out: Collection[str],
) -> pl.DataFrame:
    """The gain of the model, and of metadata with features, over metadata alone, paired by the groups drawn."""
    judged = scored.select("video_id", "group_id", "label", "fold")
    trainings = None if protocol is None else trainings_of(protocol, config, left_out)
    compared = {"The model": scored.select(scored.columns)}
    metadata = with_targets(tested(lambda rows: metadata_only(index, rows), judged, trainings), protocol)
    if config.of_features == "forensic":
        seen = read_features(paths, config)
        table = read_table(paths.features, FEATURES).select(*KEYS[:1], *seen.names)
        joint = tested(lambda rows: metadata_only(index, rows, further=table), judged, trainings)
        compared["Metadata with features"] = with_targets(joint, protocol)
    measures = [measured("roc_auc", each) for each in (metadata, *compared.values())]
    drawn = replicate_values(
        fake_labels(scored), measures, scored["group_id"].to_list(), replicates=config.bootstrap_replicates,
        seed=config.seed,
    )  # fmt: skip
    rows = []
    for number, what in enumerate(compared, start=1):
        gain = paired_difference(drawn, 0, number, confidence=config.confidence)
        aucs = (float(drawn.values[number]), float(drawn.values[0]))
        rows.append((what, *aucs, gain.value, gain.low, gain.high, gain.p_value))
    return pl.DataFrame(rows, schema=_BEYOND, orient="row").fill_nan(None)
