from itertools import permutations

import numpy as np
import pytest
import safetensors.torch
import torch

from fvc_lib.services.errors import DataError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.tables import CAPTIONS, TASK_RESULTS, VIDEO_TEXTS, check_table, frame_of
from fvc_lib.tasks.video_text.results import chance_metrics, chance_of_ranks, video_text_results
from fvc_lib.tasks.video_text.training import retrieval_ranks

CONFIG = resolve_config({"task": "video_text", "bootstrap_replicates": 100}, environ={})


def ndcg(ranks):
    ideal = sum(1 / np.log2(1 + rank) for rank in range(1, len(ranks) + 1))
    return sum(1 / np.log2(1 + rank) for rank in ranks) / ideal


@pytest.mark.parametrize(("candidates", "positives"), [(1, 1), (4, 1), (5, 2), (5, 4), (4, 4)])
def test_chance_is_the_mean_over_all_orders(candidates, positives):
    first, gains = [], []
    for order in permutations(range(candidates)):
        ranks = sorted(order.index(positive) + 1 for positive in range(positives))
        first.append(ranks[0])
        gains.append(ndcg(ranks))
    expected = np.bincount(first, minlength=candidates + 1)[1:] / len(first)
    np.testing.assert_allclose(chance_of_ranks(candidates, positives), expected, atol=1e-12)
    found = chance_metrics(np.array([candidates] * 3), np.array([positives] * 3), (1, 2, 9))
    assert found == pytest.approx(
        {
            "recall@1": np.mean(np.array(first) <= 1), "recall@2": np.mean(np.array(first) <= 2), "recall@9": 1.0,
            "mrr": np.mean(1 / np.array(first)), "ndcg": np.mean(gains), "mean_rank": np.mean(first),
            "median_rank": np.sort(first)[(len(first) - 1) // 2],
        }
    )  # fmt: skip


def test_every_number_stands_beside_its_control(tmp_path):
    """Four test videos of three texts, the third found wrongly; the last text stands beside two videos."""
    parts = [(1, "test"), (2, "test"), (3, "test"), (3, "test"), (9, "train"), (9, "train"), (1, "validation")]
    rows = [
        (f"pair{n}", f"video000{n}", f"{n}.mp4", f"text{t}", f"a {t} thing", f"group{n // 2}", part, "official", 12,
         None, f"{n:064d}")
        for n, (t, part) in enumerate(parts)
    ]  # fmt: skip
    pairs, texts = frame_of(rows, VIDEO_TEXTS), torch.eye(3)
    videos = torch.stack([texts[0], texts[1], 0.6 * texts[2] + 0.8 * texts[1], texts[2]])
    rows_of_pairs = torch.tensor([[0, 0], [1, 1], [2, 2], [3, 2]])
    retrieval = {"video_embeddings": videos, "text_embeddings": texts, "pairs": rows_of_pairs}
    ranks, embeddings = retrieval_ranks(pairs.filter(part="test"), retrieval), tmp_path / "test_embeddings.safetensors"
    safetensors.torch.save_file(retrieval, embeddings)
    written = [("a 1 thing", 1), ("a 9 thing", 2), ("", 3), ("a 3 thing", 3)]
    captions = frame_of(
        [(f"video000{n}", f"group{n // 2}", f"{n}.mp4", said, f"a {t} thing") for n, (said, t) in enumerate(written)],
        CAPTIONS,
    )
    results = check_table(video_text_results(pairs, ranks, captions, embeddings, CONFIG), TASK_RESULTS, "test")
    found = {(row["source"], row["subject"], row["metric"]): row for row in results.iter_rows(named=True)}
    value = {key: row["value"] for key, row in found.items()}
    assert value["model", "video_to_text", "recall@1"] == 0.75
    assert value["model", "text_to_video", "recall@1"] == 1.0
    assert value["model", "video_to_text", "mrr"] == pytest.approx((3 + 1 / 2) / 4)
    assert value["model", "video_to_text", "mean_positive_similarity"] == pytest.approx((3 + 0.6) / 4)
    assert value["chance", "video_to_text", "recall@1"] == pytest.approx(1 / 3)
    assert value["chance", "text_to_video", "recall@1"] == pytest.approx((1 / 4 + 1 / 4 + 2 / 4) / 3)
    assert value["model", "captions", "exact_match"] == 0.5
    assert value["most_frequent_caption", "captions", "exact_match"] == 0.0
    assert value["most_frequent_caption", "captions", "token_f1"] == pytest.approx(2 / 3)
    row = found["model", "video_to_text", "recall@1"]
    assert row["low"] <= row["value"] <= row["high"]
    assert (row["num_samples"], row["num_groups"]) == (4, 2)
    assert found["model", "text_to_video", "recall@1"]["num_samples"] == 3
    for name in {metric for source, _, metric in found if source == "model"} - {"mean_positive_similarity"}:
        assert any(source != "model" and metric == name for source, _, metric in found), name
    embeddings.write_bytes(b"nothing")
    with pytest.raises(DataError, match="test_embeddings"):
        video_text_results(pairs, ranks, captions, embeddings, CONFIG)
