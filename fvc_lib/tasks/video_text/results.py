"""Results of task video_text: metrics of the test part with intervals over groups, for the model and for controls.

A control answers without looking at the video. ``chance`` is the expected score of a random ranking, computed exactly.
``most_frequent_caption`` writes the most frequent training text for every video. An interval shows how a metric varies
with the test groups that were drawn. It does not show how it varies between training runs.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from fvc_lib.metrics import captions as captioning
from fvc_lib.metrics.classification import FloatArray, IntArray, Metric
from fvc_lib.metrics.intervals import intervals_over_groups
from fvc_lib.services import tables
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.records.digests import undamaged_content
from fvc_lib.services.run_paths import RunPaths

if TYPE_CHECKING:
    from torch import Tensor

    from fvc_lib.metrics.retrieval import RetrievalMetrics

RECALL_AT = (1, 5, 10)
MODEL = "model"
CHANCE = "chance"
MOST_FREQUENT_CAPTION = "most_frequent_caption"
CAPTION_SUBJECT = "captions"
DIRECTIONS = ("video_to_text", "text_to_video")

Row = tuple[object, ...]


def video_text_results(paths: RunPaths, config: RunConfig, *, log: Callable[[str], None] | None = None) -> pl.DataFrame:
    """Return the metrics of model and controls (TASK_RESULTS), and write them to ``task_results.feather``.

    Args:
        paths: paths of a run whose training has written ranks, captions and embeddings.
        config: gives replicates, confidence and seed.
        log: called with lines on the number of embeddings and how similarities are streamed.

    Raises:
        DataError: ranks, captions and embeddings disagree with each other or with the test part.
    """
    pairs = tables.read_table(paths.video_texts, tables.VIDEO_TEXTS)
    ranks = tables.read_table(paths.retrieval_ranks, tables.RETRIEVAL_RANKS)
    captions = tables.read_table(paths.captions, tables.CAPTIONS)
    _check_queries(pairs, ranks, captions)
    rows: list[Row] = []
    if ranks.height:
        from fvc_lib.metrics.retrieval import retrieval_metrics  # torch takes seconds to load

        stored = read_embeddings(paths.embeddings)
        embeddings = stored["video_embeddings"], stored["text_embeddings"], stored["pairs"]
        found = retrieval_metrics(*embeddings, ks=RECALL_AT, log=log)
        for direction in DIRECTIONS:
            rows += _direction_rows(direction, ranks.filter(direction=direction), found, config)
    if captions.height:
        rows += _caption_rows(pairs, captions, config)
    table = tables.check_table(tables.frame_of(rows, tables.TASK_RESULTS), tables.TASK_RESULTS, "video-text results")
    tables.write_table(table, tables.TASK_RESULTS, paths.task_results)
    return table


def chance_of_ranks(num_candidates: int, num_positives: int) -> FloatArray:
    """Return the distribution of the best positive's rank in a random order of M candidates.

    Returns:
        float64 (M,): entry k - 1 is the probability that the first of the positives has rank k.
    """
    before = np.arange(num_candidates, dtype=np.float64)
    left = num_candidates - before
    wrong = np.maximum(left - num_positives, 0)
    all_wrong = np.concatenate([[1.0], np.cumprod(wrong / left)[:-1]])
    return all_wrong * np.minimum(num_positives / left, 1.0)


def chance_metrics(num_candidates: IntArray, num_positives: IntArray, ks: Sequence[int]) -> dict[str, float]:
    """Return the expected metrics of a random ranking, by name.

    The median rank is the median of the mixture of all queries' rank distributions.

    Args:
        num_candidates: int64 (Q,), number of candidates of each query.
        num_positives: int64 (Q,), number of right candidates of each query.
        ks: where recall is wanted.
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
    recalls = {f"recall@{k}": float(within[min(k, ranks.size) - 1]) for k in ks}
    return recalls | {
        "mrr": float((ranks / places).sum()),
        "ndcg": ndcg,
        "median_rank": float(np.searchsorted(within, 0.5 - 1e-12) + 1),
        "mean_rank": float((ranks * places).sum()),
    }


def read_embeddings(path: Path) -> "dict[str, Tensor]":
    """Return ``video_embeddings``, ``text_embeddings`` and ``pairs``; raise ``DataError`` if the file is damaged."""
    import safetensors.torch  # with torch

    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(undamaged_content(path))
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(f"{path}: cannot be read as embeddings: {error}. Run 20_video_text again.") from error
    return tensors


def _direction_rows(direction: str, ranks: pl.DataFrame, found: "RetrievalMetrics", config: RunConfig) -> list[Row]:
    """Return the rows of one direction, for model and chance; the model's means over queries have an interval."""
    measured = getattr(found, direction)
    if not np.array_equal(measured.ranks, ranks["rank"].to_numpy()):
        raise DataError(
            f"retrieval_ranks: the ranks {direction} are not those of test_embeddings.safetensors. Both are written by "
            "20_video_text: run it again."
        )
    rank = ranks["rank"].to_numpy()
    of_queries = {f"recall@{k}": rank <= k for k in RECALL_AT} | {"mrr": 1 / rank, "mean_rank": rank}
    measures = {name: captioning.mean_measure(name, values) for name, values in of_queries.items()}
    groups = ranks["group_id"].to_list()
    rows = _measured_rows(MODEL, direction, measures, groups, config)
    sizes = ranks.height, len(set(groups))
    plain = ("median_rank", "ndcg", "mean_positive_similarity")
    rows += [(MODEL, direction, name, "", float(getattr(measured, name)), None, None, *sizes) for name in plain]
    chance = chance_metrics(ranks["num_candidates"].to_numpy(), ranks["num_positives"].to_numpy(), RECALL_AT)
    return rows + [(CHANCE, direction, name, "", value, None, None, *sizes) for name, value in chance.items()]


def _caption_rows(pairs: pl.DataFrame, captions: pl.DataFrame, config: RunConfig) -> list[Row]:
    trained = pairs.filter(pl.col("part") == "train")["text"]
    commonest = trained.value_counts().sort("count", "text", descending=[True, False])["text"][0]
    content = captioning.content_words(trained.to_list())
    references = [text.split("\n") for text in captions["references"]]
    groups = captions["group_id"].to_list()
    written = {MODEL: captions["caption"].to_list(), MOST_FREQUENT_CAPTION: [commonest] * captions.height}
    rows: list[Row] = []
    for source, texts in written.items():
        both = list(zip(texts, references, strict=True))
        of_videos = {
            "token_f1": [captioning.token_f1(*each) for each in both],
            "content_word_recall": [captioning.content_word_recall(*each, content) for each in both],
            "exact_match": [captioning.exact_match(*each) for each in both],
        }
        measures = {name: captioning.mean_measure(name, values) for name, values in of_videos.items()}
        measures["bleu4"] = captioning.bleu4_measure(texts, references)
        rows += _measured_rows(source, CAPTION_SUBJECT, measures, groups, config)
    return rows


def _measured_rows(
    source: str, subject: str, measures: Mapping[str, Metric], groups: Sequence[str], config: RunConfig
) -> list[Row]:
    """Return one result row with an interval per measure."""
    intervals = intervals_over_groups(
        [*measures.values()], groups,
        replicates=config.bootstrap_replicates, seed=config.seed, confidence=config.confidence,
    )  # fmt: skip
    return [(source, subject, name, "", *one.row()) for name, one in zip(measures, intervals, strict=True)]


def _check_queries(pairs: pl.DataFrame, ranks: pl.DataFrame, captions: pl.DataFrame) -> None:
    """Raise ``DataError`` where ``ranks`` or ``captions`` have a query outside of the test part.

    Queries may be missing, since a video may have no clip.
    """
    test = pairs.filter(pl.col("part") == "test")
    for name, found, due in (
        ("retrieval_ranks", ranks.filter(pl.col("direction") == "video_to_text")["query_id"], test["video_id"]),
        ("retrieval_ranks", ranks.filter(pl.col("direction") == "text_to_video")["query_id"], test["text_id"]),
        ("captions", captions["video_id"], test["video_id"]),
    ):
        foreign = sorted(set(found) - set(due))
        if foreign:
            raise DataError(
                f"{name}: {len(foreign)} rows are not of the test part, the first {foreign[0]!r}. Run 20_video_text "
                "again."
            )
