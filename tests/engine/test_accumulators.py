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


def test_what_several_gathered_in_turn_is_what_one_gathered():
    logits, labels = torch.randn(9, generator=torch.Generator().manual_seed(1)), [0.0, 1, 1, 0, 1, 0, 0, 1, 1]
    one, parts = BinaryScores(), [BinaryScores() for _ in range(3)]
    for start, part in ((0, parts[0]), (2, parts[0]), (4, parts[1]), (5, parts[1])):  # the last one gathers nothing
        stop = {0: 2, 2: 4, 4: 5, 5: 9}[start]
        for scores in (one, part):
            scores.update({"logits": logits[start:stop]}, batch(labels[start:stop], first=start))
    for part in parts[1:]:
        parts[0].add_document(part.to_document())
    assert parts[0].sample_ids == one.sample_ids == tuple(f"v{number}" for number in range(9))
    assert (parts[0].scores == one.scores).all()
    assert (parts[0].logits == one.logits).all()
    assert (parts[0].labels == one.labels).all()
    assert parts[0].compute() == one.compute()
    assert np.isfinite(list(one.compute().values())).all()
