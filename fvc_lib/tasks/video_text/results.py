"""Results of task video_text: metrics of the test part with intervals over groups, for the model and for controls.

A control answers without looking at the video. ``chance`` is the expected score of a random ranking, computed exactly.
``most_frequent_caption`` writes the most frequent training text for every video. An interval shows how a metric varies
with the test groups that were drawn. It does not show how it varies between training runs.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fvc_lib.metrics import video_text
from fvc_lib.metrics.classification import FloatArray, IntArray
from fvc_lib.metrics.intervals import mean_measure
from fvc_lib.metrics.video_text import Ranking
from fvc_lib.services.config import RunConfig
from fvc_lib.services.records.digests import undamaged_content
from fvc_lib.services.tables import TASK_RESULTS, frame_of
from fvc_lib.tasks.image.results import MODEL, Row, measured_rows

CHANCE = "chance"
MOST_FREQUENT_CAPTION = "most_frequent_caption"


def video_text_results(
    pairs: pl.DataFrame, ranks: pl.DataFrame, captions: pl.DataFrame, embeddings_file: Path, config: RunConfig
) -> pl.DataFrame:
    """Return the metrics of model and controls on the test part (TASK_RESULTS).

    Args:
        pairs: VIDEO_TEXTS of all parts.
        ranks: RETRIEVAL_RANKS of the test part; may be empty.
        captions: CAPTIONS of the test part; may be empty.
        embeddings_file: file of the embeddings of the test part; read only if ``ranks`` has rows.
        config: gives replicates, confidence and seed.

    Raises:
        DataError, OSError: as ``read_embeddings``.
    """
    rows: list[Row] = []
    if ranks.height:
        for direction, found in video_text.retrieval_metrics(**read_embeddings(embeddings_file)).items():
            rows += _direction_rows(direction, ranks.filter(direction=direction), found, config)
    if captions.height:
        trained = pairs.filter(part="train")["text"]
        commonest = trained.value_counts().sort("count", "text", descending=[True, False])["text"][0]
        content = video_text.content_words(trained.to_list())
        written = {MODEL: captions["caption"].to_list(), MOST_FREQUENT_CAPTION: [commonest] * captions.height}
        for source, texts in written.items():
            rows += _caption_rows(source, texts, captions, content, config)
    return frame_of(rows, TASK_RESULTS)


def chance_of_ranks(num_candidates: int, num_positives: int) -> FloatArray:
    """Return the probability of each rank of the first right candidate in a random order, float64 (M,).

    Entry k - 1 is the probability that the first right candidate has rank k.

    Args:
        num_candidates: M, the number of all candidates.
        num_positives: number of right candidates, those that belong to the query.
    """
    before = np.arange(num_candidates, dtype=np.float64)
    left = num_candidates - before
    wrong = np.maximum(left - num_positives, 0)
    all_wrong = np.concatenate([[1.0], np.cumprod(wrong / left)[:-1]])
    return all_wrong * np.minimum(num_positives / left, 1.0)


def chance_metrics(num_candidates: IntArray, num_positives: IntArray, ks: Sequence[int]) -> dict[str, float]:
    """Return the expected metrics of a random ranking, as a dict from name to value.

    The names are ``recall@k``, ``mrr``, ``ndcg``, ``median_rank`` and ``mean_rank``. The last two are median and mean,
    over all queries and random orders, of the rank of the first right candidate.

    Args:
        num_candidates: int64 (Q,), number of candidates of each query.
        num_positives: int64 (Q,), number of right candidates of each query.
        ks: the values of k for which ``recall@k`` is returned.
    """
    kinds, counts = np.unique(np.stack([num_candidates, num_positives]), axis=1, return_counts=True)
    share = counts / counts.sum()
    ranks = np.zeros(int(num_candidates.max()))
    ndcg = 0.0
    for (candidates, positives), weight in zip(kinds.T.tolist(), share.tolist(), strict=True):
        ranks[:candidates] += weight * chance_of_ranks(candidates, positives)
        gains = 1 / np.log2(np.arange(2, candidates + 2))
        ndcg += weight * (positives * gains.mean()) / gains[:positives].sum()
    places = np.arange(1, ranks.size + 1)
    within = np.cumsum(ranks)
    return {f"recall@{k}": float(within[min(k, ranks.size) - 1]) for k in ks} | {
        "mrr": float((ranks / places).sum()),
        "ndcg": ndcg,
        "median_rank": float(np.searchsorted(within, 0.5 - 1e-12) + 1),
        "mean_rank": float((ranks * places).sum()),
    }


def read_embeddings(path: Path) -> dict[str, Any]:
    """Return the tensors in a file of test embeddings, by name.

    They are ``video_embeddings`` (N, E), ``text_embeddings`` (M, E) and ``pairs`` (P, 2), as
    ``VideoTextOutputs.retrieval_set`` describes them.

    Raises:
        DataError: the file differs from its record in the run.
        OSError: the file cannot be read.
    """
    import safetensors.torch  # with torch

    return safetensors.torch.load(undamaged_content(path))


def _direction_rows(direction: str, ranks: pl.DataFrame, found: Ranking, config: RunConfig) -> list[Row]:
    """Return the result rows of one direction of retrieval, for the model and for a random ranking.

    Only metrics of the model that are means over queries have an interval.

    Args:
        direction: name of the direction, video to text or text to video.
        ranks: the direction's rows of RETRIEVAL_RANKS.
        found: the direction's ranking, with queries in the order of ``ranks``.
        config: gives replicates, confidence and seed.
    """
    of_queries: dict[str, Any] = {f"recall@{k}": found.ranks <= k for k in video_text.KS}
    of_queries |= {"mrr": 1 / found.ranks, "mean_rank": found.ranks}
    measures = {name: mean_measure(name, values) for name, values in of_queries.items()}
    chance = chance_metrics(ranks["num_candidates"].to_numpy(), ranks["num_positives"].to_numpy(), video_text.KS)
    exact = [(MODEL, name, found.metrics[name]) for name in ("median_rank", "ndcg", "mean_positive_similarity")]
    exact += [(CHANCE, name, value) for name, value in chance.items()]
    sizes = ranks.height, ranks["group_id"].n_unique()
    rows = measured_rows(MODEL, measures, ranks["group_id"].to_list(), config, direction)
    return rows + [(source, direction, name, "", value, None, None, *sizes) for source, name, value in exact]


def _caption_rows(
    source: str, texts: Sequence[str], captions: pl.DataFrame, content: Collection[str], config: RunConfig
) -> list[Row]:
    """Return the result rows of the captions that the model or a control wrote.

    Args:
        source: the model or a control.
        texts: the written caption of each video.
        captions: CAPTIONS of the same videos, with their references, in the same order.
        content: the content words of the training texts.
        config: gives replicates, confidence and seed.
    """
    references = [text.split("\n") for text in captions["references"]]
    both = list(zip(texts, references, strict=True))
    of_videos = {
        "token_f1": [video_text.token_f1(*pair) for pair in both],
        "content_word_recall": [video_text.content_word_recall(*pair, content) for pair in both],
        "exact_match": [video_text.exact_match(*pair) for pair in both],
    }
    measures = {name: mean_measure(name, values) for name, values in of_videos.items()}
    measures["bleu4"] = video_text.bleu4_measure(texts, references)
    return measured_rows(source, measures, captions["group_id"].to_list(), config, "captions")
