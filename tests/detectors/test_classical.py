"""Models on features say what scikit-learn's own say, from plain arrays, whatever is missing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings as budget, strategies as st

from fvc_lib.detectors.classical.boosting import Boosting
from fvc_lib.detectors.classical.logistic import Logistic, Standardised
from fvc_lib.detectors.classical.model import Part
from fvc_lib.detectors.classical.svm import SupportVectors
from fvc_lib.engine.training_state import weights_digest
from fvc_lib.services.checkpoint_files import load_weights, write_weights_with_digest
from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import DETECTORS

MODELS = {"forensic_logistic": Logistic, "forensic_svm": SupportVectors, "forensic_boosting": Boosting}


def part(seed: int = 0, rows: int = 40, columns: int = 6, missing: float = 0.1) -> Part:
    """Fakes are higher in the first column; one column is empty and one has one value."""
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.arange(rows) % 2)
    values = generator.normal(size=(rows, columns))
    values[:, 0] += 3 * labels
    values[generator.random(values.shape) < missing] = np.nan
    values[:, 1], values[:, 2] = np.nan, 7.3
    groups = np.array([f"g{row // 2}" for row in range(rows)])
    return Part(values, labels.astype(np.int64), np.ones(rows), groups, seed)


@pytest.mark.parametrize("name", MODELS)
def test_each_model_learns_in_spite_of_missing_and_constant_columns(name):
    model, seen, unseen = DETECTORS.get(name).build(), part(0), part(1)
    assert type(model) is MODELS[name]
    arrays = model.fit(seen, model.candidates(40)[-1])
    logits = model.logits(arrays, unseen.values)
    assert np.isfinite(logits).all()
    assert ((logits > 0) == unseen.labels).mean() > 0.75
    again = model.fit(seen, model.candidates(40)[-1])
    assert arrays.keys() == again.keys()
    assert all(np.array_equal(arrays[name], again[name]) for name in arrays)


@pytest.mark.parametrize("name", MODELS)
def test_arrays_come_back_from_their_file_as_they_were_also_empty_ones(tmp_path, name):
    """Where nothing is missing, there is no indicator of what is missing."""
    model, seen = DETECTORS.get(name).build(), part(0, missing=0)
    seen = replace(seen, values=seen.values[:, [0, 3, 4, 5]])
    arrays = model.fit(seen, model.candidates(40)[0])
    state = {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in arrays.items()}
    write_weights_with_digest(tmp_path / "model.safetensors", state, {})
    back = load_weights(tmp_path / "model.safetensors")
    assert weights_digest(back) == weights_digest(state)
    again = {key: tensor.numpy() for key, tensor in back.items()}
    assert np.array_equal(model.logits(again, seen.values), model.logits(arrays, seen.values))


@given(st.integers(0, 10**6))
@budget(max_examples=8, deadline=None)
def test_logistic_says_what_scikit_learns_pipeline_says(seed):
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    seen = part(seed)
    keep = [0, 3, 4, 5]  # scikit-learn drops empty columns and divides a constant one by 1
    imputer = SimpleImputer(strategy="median", add_indicator=True)
    pipeline = make_pipeline(imputer, StandardScaler(), LogisticRegression(C=1 / 30, max_iter=5000))
    pipeline.fit(seen.values[:, keep], seen.labels)
    model = Logistic()
    ours = model.logits(model.fit(seen, {"penalty": 30.0}), part(seed + 1).values)
    np.testing.assert_allclose(ours, pipeline.decision_function(part(seed + 1).values[:, keep]), rtol=1e-3, atol=1e-3)


@given(st.integers(0, 10**6))
@budget(max_examples=5, deadline=None)
def test_boosting_s_own_trees_say_to_the_bit_what_scikit_learn_s_say(seed):
    """``fit`` refuses what it learned from where they do not; here of rows that it has not seen."""
    import fvc_lib.detectors.classical.boosting as module

    fitted = {}

    def keeping(model):
        fitted["model"] = model
        return trees(model)

    trees, module._trees = module._trees, keeping
    try:
        model = Boosting()
        arrays = model.fit(part(seed), {"rounds": 20, "leaves": 4})
    finally:
        module._trees = trees
    unseen = part(seed + 1, missing=0.4).values
    expected = fitted["model"].decision_function(unseen[:, arrays["columns"]])
    assert np.array_equal(model.logits(arrays, unseen), expected)


def test_boosting_without_any_feature_knows_the_share_of_fakes():
    seen = part()
    empty = replace(seen, values=np.full((40, 3), np.nan), labels=(np.arange(40) < 10).astype(np.int64))
    model = Boosting()
    logits = model.logits(model.fit(empty, model.candidates(40)[0]), empty.values)
    np.testing.assert_allclose(logits, np.log(1 / 3))


def test_a_margin_of_unseen_groups_becomes_log_odds_and_never_turns_round():
    noise = part(3)
    noise = replace(noise, values=np.random.default_rng(0).normal(size=(40, 6)))
    model = SupportVectors()
    slope, offset = model.fit(noise, model.candidates(40)[-1])["line"]
    assert slope > 0
    assert abs(offset) < 1


def test_standardised_says_what_is_missing_once_and_ignores_what_never_varies():
    values = np.array([[1.0, np.nan, 5.0], [3.0, np.nan, 5.0], [np.nan, np.nan, 5.0]])
    arrays = Standardised.fit(values)
    assert arrays["indicator"].tolist() == [0]
    seen = Standardised.of(arrays, np.array([[np.nan, 9.0, 6.0]]))
    assert seen[0, :3].tolist() == [0.0, 0.0, 0.0]
    assert seen[0, 3] > 0


def test_a_model_on_a_trunk_s_features_has_that_trunk_s_clips():
    spec, trunk = DETECTORS.get("embedding_logistic:efficientnet_lite0"), DETECTORS.get("efficientnet_lite0")
    assert (spec.num_frames, spec.side, spec.trunk, spec.of_features) == (
        trunk.num_frames, trunk.side, "efficientnet_lite0", "embedding",
    )  # fmt: skip
    assert "fvc_lib.detectors.frames.efficientnet_lite0" in DETECTORS.declared_in(spec.name)
    assert DETECTORS.of_features(spec.name) == "embedding"
    with pytest.raises(UsageError, match="has no trunk"):
        DETECTORS.get("embedding_logistic:forensic_boosting")
