"""The public functions: what a script or a notebook uses of FVC."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import roc_auc_score

import fvc_lib as fvc
from fvc_lib import public


def test_the_package_offers_the_public_names_with_an_example_and_loads_nothing_before() -> None:
    assert sorted(public.__all__) == sorted(fvc._PUBLIC)
    assert set(public.__all__) <= set(dir(fvc))
    for name in public.__all__:
        shown = getattr(fvc, name)
        if not isinstance(shown, type) and name != "list_runs":
            assert "Examples:" in shown.__doc__, name
    loaded = "import sys, fvc_lib; print([name for name in ('torch', 'polars', 'av') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'decode'"):
        _ = fvc.decode


def test_scores_are_evaluated_with_intervals_over_groups() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], 20)
    scores = rng.uniform(size=40) * 0.5 + labels * 0.3
    groups = [f"g{number // 2}" for number in range(40)]
    found = fvc.evaluate(labels, scores, groups=groups)
    auc = found.row(by_predicate=pl.col("metric") == "roc_auc", named=True)
    assert auc["value"] == pytest.approx(roc_auc_score(labels, scores))
    assert auc["low"] < auc["value"] < auc["high"]
    assert (auc["num_videos"], auc["num_groups"]) == (40, 20)
    named = ["fake" if label else "Real" for label in labels]
    assert fvc.evaluate(named, scores, groups=groups).equals(found)
    assert "brier_score" in found["metric"]
    assert "brier_score" not in fvc.evaluate(labels, scores * 3, groups=groups)["metric"]


FOLDED = ("video_id", "group_id", "label")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fvc.evaluate([0, 1], [0.5]), ("scores", "shape")),
        (lambda: fvc.evaluate([0, 2], [0.5, 0.1]), ("labels", "2")),
        (lambda: fvc.evaluate(["real", "maybe"], [0.5, 0.1]), ("maybe",)),
        (lambda: fvc.evaluate([0, 1], [0.5, np.nan]), ("scores", "NaN")),
        (lambda: fvc.evaluate([0, 1], [0.5, 0.1], groups=["a"]), ("groups",)),
        (lambda: fvc.make_folds(pl.DataFrame({"video_id": ["a"], "label": ["real"]})), ("group_id",)),
        (lambda: fvc.make_folds(pl.DataFrame({"video_id": ["a"], "group_id": ["a"], "label": ["0"]})), ("label",)),
        (lambda: fvc.make_folds([1, 2]), ("list", "polars")),
        (lambda: fvc.make_folds(pl.DataFrame(schema=dict.fromkeys(FOLDED, pl.String))), ("video_id", "one row")),
        (lambda: fvc.make_folds(pl.DataFrame(dict.fromkeys(FOLDED[:2], ["a"] * 2) | {"label": "real"})), ("one row",)),
        (lambda: fvc.decode_clip("video.mp4", 0), ("num_frames", "0")),
        (lambda: fvc.index("nowhere"), ("nowhere",)),
        (lambda: fvc.index("nowhere", epochz=3), ("epochz",)),
        (lambda: fvc.open_run("no_such_run"), ("no_such_run",)),
        (lambda: fvc.load_detector("no_such_run"), ("no_such_run",)),
    ],
)
def test_wrong_arguments_are_refused_by_name(call, words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FVC_RUNS_DIR", str(tmp_path))
    with pytest.raises(fvc.FvcError) as refused:
        call()
    assert all(word in str(refused.value) for word in words), refused.value
