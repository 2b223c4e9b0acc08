import math

import pytest
import torch
from torch.nn import functional as F

from fvc_lib.detectors.own.video_text import (
    LOG_SCALE_BOUNDS,
    SimilarityScale,
    positive_pairs,
)


def embeddings(rows: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    video, text = (torch.randn(rows, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    return F.normalize(video, dim=1).requires_grad_(), F.normalize(text, dim=1).requires_grad_()


def naive_positives(videos, texts):
    shown = set(zip(videos, texts, strict=True))
    return [[(video, text) in shown for text in texts] for video in videos]


def naive_softmax(similarities, positives):
    size, total = len(positives), 0.0
    for i in range(size):
        row = [similarities[i, j] for j in range(size)]
        column = [similarities[j, i] for j in range(size)]
        for values, wanted in ((row, positives[i]), (column, [positives[j][i] for j in range(size)])):
            normaliser = torch.log(sum(torch.exp(value) for value in values))
            right = [value - normaliser for value, is_right in zip(values, wanted, strict=True) if is_right]
            total = total - 0.5 * sum(right) / len(right)
    return total


def naive_sigmoid(similarities, positives):
    size, total = len(positives), 0.0
    for i in range(size):
        for j in range(size):
            sign = 1.0 if positives[i][j] else -1.0
            total = total - torch.log(1 / (1 + torch.exp(-sign * similarities[i, j])))
    return total


# Single pairs; a repeated text; a video with two texts; both, where video 1 also belongs to text 5.
CASES = [
    ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5)),
    ((0, 1, 2, 3, 4, 5), (0, 1, 0, 0, 2, 3)),
    ((0, 0, 1, 2, 3, 3), (0, 1, 2, 3, 4, 5)),
    ((1, 1, 2, 3, 4, 2), (4, 5, 5, 1, 2, 3)),
]


@pytest.mark.parametrize(("videos", "texts"), CASES)
def test_positives_are_all_pairs_that_the_batch_shows(videos, texts):
    found = positive_pairs(torch.tensor(videos), torch.tensor(texts))
    assert found.dtype == torch.bool
    assert found.tolist() == naive_positives(videos, texts)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("videos", "texts"), CASES)
def test_loss_and_gradients_are_those_of_the_formula(loss, videos, texts):
    scale, indices = SimilarityScale(loss, 6).double(), (torch.tensor(videos), torch.tensor(texts))
    video, text = embeddings()
    read = [video, text, *scale.parameters()]
    naive = naive_softmax if loss == "softmax" else naive_sigmoid
    whole = naive(scale(video, text), naive_positives(videos, texts))
    wanted = [whole, *torch.autograd.grad(whole, read)]
    loss_of_all = scale.contrastive(video, text, *indices)
    found = [loss_of_all, *torch.autograd.grad(loss_of_all, read)]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("push", [1, -1])
@pytest.mark.parametrize("at", [0.5, 9.0, -2.0])
def test_the_scale_is_bounded_and_finds_its_way_back(at, push):
    """A step goes against the gradient ``push``, so +1 leads back from above the upper bound."""
    scale = SimilarityScale("softmax", 4).double()
    one = torch.ones(1, 1, dtype=torch.float64)
    with torch.no_grad():
        scale.log_scale.fill_(at)
    similarity = scale(one, one)
    low, high = LOG_SCALE_BOUNDS
    inside = min(max(at, low), high)
    assert float(similarity.detach()) == pytest.approx(math.exp(inside))
    (push * similarity).sum().backward()
    torch.optim.SGD([scale.log_scale], lr=1e-3).step()
    with torch.no_grad():
        scale(one, one)
    after = float(scale.log_scale.detach())
    assert low <= after <= high
    leaves = inside in (low, high) and (push > 0) == (inside == low)
    assert (after == pytest.approx(inside, abs=1e-9)) is leaves
