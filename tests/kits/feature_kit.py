"""Small runs of models on features: folds, and a table of made-up forensic features in which labels show."""

from pathlib import Path

import numpy as np
import polars as pl

from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import FEATURES, FOLDS, INDEX, write_table
from fvc_lib.tasks.video.results import families_of
from tests.kits.training import ScoredTables, TinyTraining


def feature_run(
    folder: Path, *, num_groups: int = 24, per_group: int = 2, shift: float = 2.0, **changes: object
) -> TinyTraining:
    """A run whose ``sharpness`` features are ``shift`` deviations higher of fakes; nothing trained yet."""
    settings = {"model": "forensic_logistic", "num_folds": 3, "bootstrap_replicates": 200, **changes}
    config = RunConfig(
        cache_dir=str(folder / "cache"),
        runs_dir=str(folder / "runs"),
        feature_families="sharpness,spectrum",
        **settings,
    )
    tiny = TinyTraining(RunPaths(folder / "runs" / "tiny" / "run_20260101_000000_00000000"), config)
    folds = ScoredTables.folds(num_groups=num_groups, per_group=per_group, num_folds=3)
    write_table(folds, FOLDS, tiny.paths.folds)
    write_table(ScoredTables.index(folds), INDEX, tiny.paths.index)
    # Videos of a group are copies, to a hundredth; some values are missing.
    generator, names = np.random.default_rng(0), families_of(config)
    groups, place = np.unique(folds["group_id"].to_numpy(), return_inverse=True)
    values = generator.normal(size=(len(groups), len(names)))[place] + 0.01 * generator.normal(size=(folds.height, 1))
    told = np.array([family == "sharpness" for family in names.values()])
    values += shift * np.outer(folds["label"].to_numpy() == "fake", told)
    values[generator.random(values.shape) < 0.03] = np.nan
    columns = pl.DataFrame(values.astype(np.float32), schema=list(names)).fill_nan(None)
    features = pl.concat([folds.select("video_id", "group_id", "label"), columns], how="horizontal").sort("video_id")
    write_table(features, FEATURES, tiny.paths.features)
    return tiny
