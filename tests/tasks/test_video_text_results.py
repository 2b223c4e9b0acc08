from itertools import permutations

import numpy as np
import polars as pl
import pytest
import safetensors.torch
import torch

from fvc_lib.services.errors import DataError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import CAPTIONS, RETRIEVAL_RANKS, TASK_RESULTS, VIDEO_TEXTS, read_table, write_table
from fvc_lib.tasks.video_text.results import chance_metrics, chance_of_ranks, video_text_results
from fvc_lib.tasks.video_text.training import retrieval_ranks

CONFIG = resolve_config({"task": "video_text", "bootstrap_replicates": 100}, environ={})


def types(schema):
    return {name: column.dtype for name, column in schema.columns.items()}


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


@pytest.fixture
def run(tmp_path):
    """Four test videos of three texts, the third found wrongly; the last text stands beside two videos."""
    rows = [
        (f"pair{n}", f"video000{n}", f"{n}.mp4", f"text{t}", f"a {t} thing", f"group{n // 2}", part, "official", 12,
         None, f"{n:064d}")
        for n, (t, part) in enumerate(
            [(1, "test"), (2, "test"), (3, "test"), (3, "test"), (9, "train"), (9, "train"), (1, "validation")]
        )
    ]  # fmt: skip
    pairs = pl.DataFrame(rows, schema=types(VIDEO_TEXTS), orient="row")
    paths = RunPaths(tmp_path)
    write_table(pairs, VIDEO_TEXTS, paths.video_texts)
    texts = torch.eye(3)
    videos = torch.stack([texts[0], texts[1], 0.6 * texts[2] + 0.8 * texts[1], texts[2]])
    rows_of_pairs = torch.tensor([[0, 0], [1, 1], [2, 2], [3, 2]])
    retrieval = {"video_embeddings": videos, "text_embeddings": texts, "pairs": rows_of_pairs}
    test = pairs.filter(pl.col("part") == "test")
    write_table(retrieval_ranks(test, retrieval), RETRIEVAL_RANKS, paths.retrieval_ranks)
    safetensors.torch.save_file(retrieval, paths.embeddings)
    captions = [
        (f"video000{n}", f"group{n // 2}", f"{n}.mp4", caption, f"a {t} thing")
        for n, (caption, t) in enumerate([("a 1 thing", 1), ("a 9 thing", 2), ("", 3), ("a 3 thing", 3)])
    ]
    write_table(pl.DataFrame(captions, schema=types(CAPTIONS), orient="row"), CAPTIONS, paths.captions)
    return paths


def test_every_number_stands_beside_its_control(run):
    results = video_text_results(run, CONFIG)
    assert read_table(run.task_results, TASK_RESULTS).equals(results)
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


def test_damaged_embeddings_are_named(run):
    run.embeddings.write_bytes(b"nothing")
    with pytest.raises(DataError, match="test_embeddings"):
        video_text_results(run, CONFIG)
