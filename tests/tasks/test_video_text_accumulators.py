import math

import torch
from torch.nn import functional as F

from fvc_lib.engine.task import Batch
from fvc_lib.tasks.video_text.training import VideoTextOutputs

VIDEOS, TEXTS = (5, 5, 2, 9, 7), (1, 3, 1, 4, 3)  # video 5 has two texts; texts 1 and 3 have two videos each


def outputs(videos=VIDEOS, texts=TEXTS, seed=0):
    """Embeddings that follow from the numbers, losses from the place."""
    generator = torch.Generator().manual_seed(seed)
    bank = F.normalize(torch.randn(2, 10, 6, generator=generator), dim=2)
    rows = len(videos)
    return {
        "video_embedding": bank[0][list(videos)],
        "text_embedding": bank[1][list(texts)],
        "caption_loss": torch.arange(rows) / 4,
        "caption_tokens": torch.arange(rows * 3).reshape(rows, 3).float(),
    }


def batch(videos=VIDEOS, texts=TEXTS, first=0):
    tensors = {"video_index": torch.tensor(videos), "text_index": torch.tensor(texts)}
    return Batch(tuple(f"pair_{first + i}" for i in range(len(videos))), tensors)


def gathered(*sizes):
    found, whole, start = VideoTextOutputs(), outputs(), 0
    for size in sizes:
        part = {name: values[start : start + size] for name, values in whole.items()}
        found.update(part, batch(VIDEOS[start : start + size], TEXTS[start : start + size], start))
        start += size
    return found


def test_equal_texts_and_equal_videos_are_one():
    found = gathered(5).retrieval_set()
    given = outputs()
    for name, numbers in (("video_embedding", VIDEOS), ("text_embedding", TEXTS)):
        first = [numbers.index(number) for number in sorted(set(numbers))]
        assert found[f"{name}s"].equal(given[name][first])
    ids = [(sorted(set(VIDEOS))[v], sorted(set(TEXTS))[t]) for v, t in found["pairs"].tolist()]
    assert sorted(ids) == sorted(zip(VIDEOS, TEXTS, strict=True))


def test_embeddings_that_are_no_numbers_measure_nothing():
    broken = outputs()
    broken["video_embedding"][2, 0] = math.nan
    found = VideoTextOutputs()
    found.update(broken, batch())
    metrics = found.compute()
    assert set(metrics) == set(gathered(5).compute())
    assert all(math.isnan(value) for name, value in metrics.items() if name != "caption_loss")
