"""Stored arrays of classical models give the scores of the fitted estimators, also with missing values."""

import importlib.util

import numpy as np
import pytest
import torch

from fvc_lib.detectors import classical
from fvc_lib.detectors.classical import fit_scaling, scaled
from fvc_lib.services.checkpoint_files import load_weights, weights_digest, write_weights_with_digest
from fvc_lib.services.registry import DETECTORS

NAMES = ("forensic_logistic", "forensic_svm", "forensic_boosting", "forensic_xgboost", "forensic_lightgbm")
INSTALLED = [name for name in NAMES if all(map(importlib.util.find_spec, DETECTORS.get(name).packages))]


def part(seed: int = 0, missing: float = 0.1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return values (40, 6), labels and weights. Fakes are higher in column 0; column 1 is empty, column 2 constant."""
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.arange(40) % 2)
    values = generator.normal(size=(40, 6))
    values[:, 0] += 3 * labels
    values[generator.random(values.shape) < missing] = np.nan
    values[:, 1], values[:, 2] = np.nan, 7.3
    return values, labels.astype(np.int64), np.ones(40)


@pytest.mark.parametrize("name", INSTALLED)
def test_each_model_learns_despite_gaps_gives_the_same_bits_again_and_survives_its_file(tmp_path, name):
    model, (values, labels, weights) = DETECTORS.get(name).estimator, part(0)
    unseen, unseen_labels, _ = part(1)
    arrays = model.fit(values, labels, weights, model.candidates[-1])
    logits = model.logits(arrays, unseen)
    assert np.isfinite(logits).all()
    assert ((logits > 0) == unseen_labels).mean() > 0.75
    again = model.fit(values, labels, weights, model.candidates[-1])
    assert {key: array.tobytes() for key, array in arrays.items()} == {key: a.tobytes() for key, a in again.items()}
    state = {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in arrays.items()}
    write_weights_with_digest(tmp_path / "model.safetensors", state, {})
    stored = load_weights(tmp_path / "model.safetensors")
    assert weights_digest(stored) == weights_digest(state)
    assert np.array_equal(model.logits({key: each.numpy() for key, each in stored.items()}, unseen), logits)


def test_logistic_equals_scikit_learns_pipeline():
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    kept = [0, 3, 4, 5]  # scikit-learn drops empty columns and divides a constant one by 1
    for seed in range(4):
        (values, labels, weights), (unseen, _, _) = part(seed), part(seed + 1)
        imputer = SimpleImputer(strategy="median", add_indicator=True)
        pipeline = make_pipeline(imputer, StandardScaler(), LogisticRegression(C=1 / 30, max_iter=5000))
        pipeline.fit(values[:, kept], labels)
        ours = classical.LOGISTIC.logits(classical.LOGISTIC.fit(values, labels, weights, {"penalty": 30.0}), unseen)
        np.testing.assert_allclose(ours, pipeline.decision_function(unseen[:, kept]), rtol=1e-3, atol=1e-3)


def test_scaling_marks_gaps_and_ignores_constant_columns():
    arrays = fit_scaling(np.array([[1.0, np.nan, 5.0], [3.0, np.nan, 5.0], [np.nan, np.nan, 5.0]]))
    assert arrays["indicator"].tolist() == [0]
    seen = scaled(arrays, np.array([[np.nan, 9.0, 6.0]]))
    assert seen[0, :3].tolist() == [0.0, 0.0, 0.0]
    assert seen[0, 3] > 0
