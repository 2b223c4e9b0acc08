"""Results of tasks image and video_text: metrics of the test part with intervals over groups, for model and controls.

A control predicts without looking at the picture or video. ``majority_class`` predicts the most frequent class of the
training part and ranks classes by frequency. ``mean_predictor`` predicts the target's mean in it. ``chance`` is the
expected score of a random ranking, computed exactly. ``most_frequent_caption`` writes the most frequent training text
for every video. An interval shows how a metric varies with the test groups that were drawn. It does not show how it
varies between training runs.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fvc_lib.metrics import video_text
from fvc_lib.metrics.classification import FloatArray, IntArray, Metric
from fvc_lib.metrics.declaration import declaration
from fvc_lib.metrics.intervals import intervals_over_groups, mean_measure
from fvc_lib.metrics.recognition import class_measures, class_scores, regression_measures
from fvc_lib.services.config import RunConfig
from fvc_lib.services.records.digests import undamaged_content
from fvc_lib.services.tables import TASK_RESULTS, frame_of

MODEL = "model"
MAJORITY_CLASS = "majority_class"
MEAN_PREDICTOR = "mean_predictor"
CHANCE = "chance"
MOST_FREQUENT_CAPTION = "most_frequent_caption"

Row = tuple[object, ...]


def _measured_rows(
    source: str,
    measures: Mapping[str, Metric],
    groups: pl.Series,
    config: RunConfig,
    subject: str = "all",
    unit: str = "",
) -> list[Row]:
    """Return one row of the table TASK_RESULTS per metric: its value and its confidence interval over groups.

    Args:
        source: the model or a control.
        measures: the metrics by name.
        groups: group id of each test sample.
        config: gives replicates, confidence and seed.
        subject: what is measured, such as ``target:NAME``; ``all`` for the classes of pictures.
        unit: unit of the target, such as ``kcal``. It is written for metrics in that unit, such as the mean absolute
            error; the unit of other metrics is empty.
    """
    intervals = intervals_over_groups(
        list(measures.values()), groups.to_list(),
        replicates=config.bootstrap_replicates, seed=config.seed, confidence=config.confidence,
    )  # fmt: skip
    return [
        (source, subject, name, unit if (known := declaration(name)) and known.unit == "target" else "", *one.row())
        for name, one in zip(measures, intervals, strict=True)
    ]


# --- Task image.


def image_results(
    images: pl.DataFrame, targets: pl.DataFrame, classes: pl.DataFrame, numbers: pl.DataFrame, config: RunConfig
) -> pl.DataFrame:
    """Return the table TASK_RESULTS of task image: metrics of the model and of its controls on the test part.

    Args:
        images: IMAGES of all parts.
        targets: IMAGE_TARGETS of all parts.
        classes: IMAGE_PREDICTIONS of the test part.
        numbers: TARGET_PREDICTIONS of the test part.
        config: gives replicates, confidence and seed.
    """
    classes, training = classes.sort("image_id"), images.filter(part="train")
    rows = _class_rows(training["class_label"].drop_nulls(), classes, config) if classes.height else []
    for (target,), table in numbers.sort("target", "image_id").group_by("target", maintain_order=True):
        known = targets.filter(target=target).join(training, on="image_id", how="semi")["value"]
        values = table["value"].to_numpy()
        mean = np.full(values.size, np.mean(known.to_numpy()))
        for source, predicted in ((MODEL, table["predicted"].to_numpy()), (MEAN_PREDICTOR, mean)):
            measures = regression_measures(values, predicted)
            rows += _measured_rows(source, measures, table["group_id"], config, f"target:{target}", table["unit"][0])
    return frame_of(rows, TASK_RESULTS)


def _class_rows(trained: pl.Series, predictions: pl.DataFrame, config: RunConfig) -> list[Row]:
    """Return the result rows on classes, of the model and of the control that predicts the most frequent class.

    Args:
        trained: class labels of the training pictures.
        predictions: IMAGE_PREDICTIONS of the test part.
        config: gives replicates, confidence and seed.
    """
    by_frequency = trained.value_counts().sort("count", "class_label", descending=[True, False])["class_label"]
    rank_of = {name: rank for rank, name in enumerate(by_frequency, start=1)}
    labels, predicted = predictions["class_label"].to_numpy(), predictions["predicted_label"].to_numpy()
    own = class_measures(predictions["rank_of_class"], labels, predicted)
    majority = class_measures([rank_of[name] for name in labels], labels, np.full(labels.shape, by_frequency[0]))
    rows = _measured_rows(MODEL, own, predictions["group_id"], config)
    # Metrics of a single class have no interval, because a class has too few pictures.
    sizes = predictions.group_by("class_label").agg(pl.len(), pl.col("group_id").n_unique()).sort("class_label").rows()
    for metric, values in class_scores(labels, predicted).items():
        for value, (name, *size) in zip(values.tolist(), sizes, strict=True):
            rows.append((MODEL, f"class:{name}", metric, "", value, None, None, *size))
    return rows + _measured_rows(MAJORITY_CLASS, majority, predictions["group_id"], config)


# --- Task video_text.


def video_text_results(
    pairs: pl.DataFrame, ranks: pl.DataFrame, captions: pl.DataFrame, embeddings_file: Path, config: RunConfig
) -> pl.DataFrame:
    """Return the table TASK_RESULTS of task video_text: metrics of the model and of its controls on the test part.

    Args:
        pairs: VIDEO_TEXTS of all parts.
        ranks: RETRIEVAL_RANKS of the test part; may be empty.
        captions: CAPTIONS of the test part; may be empty.
        embeddings_file: file of the embeddings of the test part; read only if ``ranks`` has rows.
        config: gives replicates, confidence and seed.

    Raises:
        DataError: the file of embeddings differs from its record in the run.
        OSError: this file cannot be read.
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
    left = num_candidates - np.arange(num_candidates, dtype=np.float64)
    wrong = np.maximum(left - num_positives, 0)
    all_wrong = np.concatenate([[1.0], np.cumprod(wrong / left)[:-1]])
    return all_wrong * np.minimum(num_positives / left, 1.0)


def chance_metrics(num_candidates: int, num_positives: IntArray, ks: Sequence[int]) -> dict[str, float]:
    """Return the expected metrics of a random ranking, as a dict from name to value.

    The names are ``recall@k``, ``mrr``, ``ndcg``, ``median_rank`` and ``mean_rank``. The last two are median and mean,
    over all queries and random orders, of the rank of the first right candidate.

    Args:
        num_candidates: number of candidates, the same for every query.
        num_positives: int64 (Q,), number of right candidates of each query.
        ks: the values of k for which ``recall@k`` is returned.
    """
    counts, queries = np.unique(num_positives, return_counts=True)
    places = np.arange(1, num_candidates + 1)
    gains = 1 / np.log2(places + 1)
    ranks, ndcg = np.zeros(num_candidates), 0.0
    for positives, share in zip(counts.tolist(), (queries / queries.sum()).tolist(), strict=True):
        ranks += share * chance_of_ranks(num_candidates, positives)
        ndcg += share * (positives * gains.mean()) / gains[:positives].sum()
    within = np.cumsum(ranks)
    return {f"recall@{k}": float(within[min(k, num_candidates) - 1]) for k in ks} | {
        "mrr": float((ranks / places).sum()),
        "ndcg": ndcg,
        "median_rank": float(np.searchsorted(within, 0.5 - 1e-12) + 1),
        "mean_rank": float((ranks * places).sum()),
    }


def read_embeddings(path: Path) -> dict[str, Any]:
    """Return the tensors in a file of test embeddings, by name.

    They are ``video_embeddings`` (N, E), ``text_embeddings`` (M, E) and ``pairs`` (P, 2): the row numbers of each video
    and text that belong together.

    Raises:
        DataError: the file differs from its record in the run.
        OSError: the file cannot be read.
    """
    import safetensors.torch  # with torch

    return safetensors.torch.load(undamaged_content(path))


def _direction_rows(direction: str, ranks: pl.DataFrame, found: video_text.Ranking, config: RunConfig) -> list[Row]:
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
    chance = chance_metrics(found.num_candidates, found.num_positives, video_text.KS)
    exact = [(MODEL, name, found.metrics[name]) for name in ("median_rank", "ndcg", "mean_positive_similarity")]
    exact += [(CHANCE, name, value) for name, value in chance.items()]
    sizes = ranks.height, ranks["group_id"].n_unique()
    rows = _measured_rows(MODEL, measures, ranks["group_id"], config, direction)
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
    return _measured_rows(source, measures, captions["group_id"], config, "captions")
