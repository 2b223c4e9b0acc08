import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from fvc_lib.engine.task import Batch
from fvc_lib.tasks.video.task import BinaryScores


def batch(labels: list[float], first: int = 0) -> Batch:
    ids = tuple(f"v{first + i}" for i in range(len(labels)))
    return Batch(ids, {"label": torch.tensor(labels)})


def test_scores_keep_order_and_give_the_field_s_metrics():
    generator = np.random.default_rng(0)
    logits, labels = generator.normal(size=11), generator.integers(0, 2, 11)
    scores = BinaryScores()
    for start in range(0, 11, 4):
        part = slice(start, start + 4)
        scores.update({"logits": torch.tensor(logits[part])}, batch(labels[part].tolist(), start))
    assert scores.sample_ids == tuple(f"v{i}" for i in range(11))
    np.testing.assert_array_equal(scores.logits, logits)
    np.testing.assert_allclose(scores.scores, 1 / (1 + np.exp(-logits)))
    assert scores.labels.tolist() == labels.tolist()
    assert scores.compute()["roc_auc"] == pytest.approx(roc_auc_score(labels, logits))
