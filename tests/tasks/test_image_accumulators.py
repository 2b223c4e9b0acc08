"""What is gathered of a pass over pictures: the metrics of all at once, however it was gathered."""

import itertools
import math
import pickle

import numpy as np
import pytest
import torch

from fvc_lib.engine.task import Batch
from fvc_lib.metrics.recognition import ranks_of_class
from fvc_lib.tasks.image.data import ImageLabels
from fvc_lib.tasks.image.training import ImageScores

LABELS = ImageLabels(tuple("abcdefg"), ("calories", "mass"), ("kcal", "g"), (500.0, 80.0), (100.0, 7.0))


def outputs_and_batch(count=20, seed=0, labels=LABELS):
    generator = torch.Generator().manual_seed(seed)
    num_classes, num_targets = len(labels.classes), len(labels.targets)
    classes = torch.randint(-1, num_classes, (count,), generator=generator) if num_classes else torch.full((count,), -1)
    tensors = {
        "class_index": classes,
        "values": torch.randn(count, num_targets, generator=generator),
        "known": (torch.rand(count, num_targets, generator=generator) < 0.7).float(),
    }
    # Few distinct scores, so that there are ties.
    logits = torch.randint(0, 4, (count, num_classes), generator=generator).float()
    outputs = {"class_logits": logits, "values": torch.randn(count, num_targets, generator=generator)}
    return outputs, Batch(tuple(f"i{seed}_{n}" for n in range(count)), tensors)


def filled(parts, labels=LABELS):
    scores = ImageScores(labels)
    for outputs, batch in parts:
        scores.update(outputs, batch)
    return scores


def cut(outputs, batch, start, stop):
    return {name: tensor[start:stop] for name, tensor in outputs.items()}, batch.part(start, stop)


def test_the_metrics_are_those_of_the_definitions():
    outputs, batch = outputs_and_batch()
    scores = filled([(outputs, batch)])
    classes = scores.classes()
    rows = torch.nonzero(batch.tensors["class_index"] >= 0).squeeze(1)
    assert classes.rows.tolist() == rows.tolist()
    logits, labels = outputs["class_logits"][rows].numpy(), batch.tensors["class_index"][rows].numpy()
    assert classes.ranks.tolist() == ranks_of_class(logits, labels).tolist()
    assert classes.predicted.tolist() == logits.argmax(1).tolist()
    np.testing.assert_allclose(classes.probabilities, torch.from_numpy(logits).double().softmax(1).amax(1))
    metrics = scores.compute()
    assert metrics["top1"] == (classes.ranks == 1).mean()
    assert metrics["top5"] == (classes.ranks <= 5).mean()
    known = batch.tensors["known"][:, 0] > 0
    errors = 100 * (outputs["values"] - batch.tensors["values"])[known, 0].abs().double()
    assert metrics["mae_calories"] == pytest.approx(errors.mean().item(), rel=1e-6)
    outputs["class_logits"].zero_()  # equal scores count against the model
    assert filled([(outputs, batch)]).compute()["top1"] == 0
    assert set(metrics) == {"top1", "top5", "macro_f1", "mae_calories", "r2_calories", "mae_mass", "r2_mass"}


def test_what_several_gathered_is_what_one_gathers_to_the_bit():
    outputs, batch = outputs_and_batch()
    one = filled([(outputs, batch)])
    joined = ImageScores(LABELS)
    for start, stop in itertools.pairwise((0, 1, 7, 7, 20)):
        part = filled([cut(outputs, batch, start, stop)])
        joined.add_document(pickle.loads(pickle.dumps(part.to_document())))
    assert joined.sample_ids == one.sample_ids
    assert joined.compute() == one.compute()
    before, after = one.to_document()["columns"], joined.to_document()["columns"]
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_no_number_makes_its_metrics_undefined_and_no_others(bad):
    outputs, batch = outputs_and_batch()
    row = int(torch.nonzero((batch.tensors["class_index"] >= 0) & (batch.tensors["known"][:, 1] > 0))[0])
    outputs["class_logits"][row, 2] = bad
    outputs["values"][row, 1] = bad
    metrics = filled([(outputs, batch)]).compute()
    undefined = {name for name, value in metrics.items() if math.isnan(value)}
    assert undefined == {"top1", "top5", "macro_f1", "mae_mass", "r2_mass"}
