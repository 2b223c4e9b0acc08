import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fvc_lib.engine.task import Batch
from fvc_lib.tasks.video_text.training import VideoTextOutputs
from tests.kits.video_text_kit import CONFIG

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
    found, whole, start = VideoTextOutputs(CONFIG), outputs(), 0
    for size in sizes:
        part = {name: values[start : start + size] for name, values in whole.items()}
        found.update(part, batch(VIDEOS[start : start + size], TEXTS[start : start + size], start))
        start += size
    return found


def naive_mrr(videos, texts, similarity):
    """Of the best right candidate among different videos and different texts; ties count against the model."""
    shown = set(zip(videos, texts, strict=True))

    def mean(queries, candidates, score, right):
        total = 0.0
        for query in queries:
            best = max(score(query, c) for c in candidates if right(query, c))
            total += 1 / (1 + sum(score(query, c) >= best for c in candidates if not right(query, c)))
        return total / len(queries)

    v, t = sorted(set(videos)), sorted(set(texts))
    return {
        "video_to_text/mrr": mean(v, t, lambda q, c: similarity[q, c], lambda q, c: (q, c) in shown),
        "text_to_video/mrr": mean(t, v, lambda q, c: similarity[c, q], lambda q, c: (c, q) in shown),
    }


def test_equal_texts_and_equal_videos_are_one():
    found = gathered(5).retrieval_set()
    assert found.video_embeddings.shape == (4, 6)
    assert found.text_embeddings.shape == (3, 6)
    ids = [(sorted(set(VIDEOS))[v], sorted(set(TEXTS))[t]) for v, t in found.pairs.tolist()]
    assert sorted(ids) == sorted(zip(VIDEOS, TEXTS, strict=True))
    assert [VIDEOS[place] for place in found.video_places] == sorted(set(VIDEOS))
    assert [TEXTS[place] for place in found.text_places] == sorted(set(TEXTS))


def test_metrics_are_the_naive_ones():
    whole = outputs()
    similarity = {
        (v, t): float(whole["video_embedding"][i].double() @ whole["text_embedding"][j].double())
        for i, v in enumerate(VIDEOS)
        for j, t in enumerate(TEXTS)
    }
    found = gathered(5).compute()
    assert found["caption_loss"] == pytest.approx(0.5)
    for name, value in naive_mrr(VIDEOS, TEXTS, similarity).items():
        assert found[name] == pytest.approx(value)
    assert {f"{d}/recall@{k}" for d in ("video_to_text", "text_to_video") for k in (1, 5)} < set(found)


def test_parts_added_in_order_are_the_whole_to_the_bit():
    whole, joined = gathered(5), VideoTextOutputs(CONFIG)
    parts = [VideoTextOutputs(CONFIG), VideoTextOutputs(CONFIG), VideoTextOutputs(CONFIG)]
    values = outputs()
    for part, (start, stop) in zip(parts, [(0, 2), (2, 2), (2, 5)], strict=True):
        if stop > start:
            mine = {name: each[start:stop] for name, each in values.items()}
            part.update(mine, batch(VIDEOS[start:stop], TEXTS[start:stop], start))
        joined.add_document(part.to_document())
    assert joined.compute() == whole.compute()
    assert joined.sample_ids == whole.sample_ids
    assert joined.caption_tokens.equal(whole.caption_tokens)
    assert whole.caption_tokens.tolist() == np.arange(15).reshape(5, 3).tolist()


def test_embeddings_that_are_no_numbers_measure_nothing():
    broken = outputs()
    broken["video_embedding"][2, 0] = math.nan
    found = VideoTextOutputs(CONFIG)
    found.update(broken, batch())
    metrics = found.compute()
    assert set(metrics) == set(gathered(5).compute())
    assert all(math.isnan(value) for name, value in metrics.items() if name != "caption_loss")
