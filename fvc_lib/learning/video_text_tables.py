"""What is written of the test part of task video_text: ranks, captions and embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import safetensors.torch
import torch

from fvc_lib.learning.text_tokenizer import TextTokenizer
from fvc_lib.learning.video_text_accumulators import RetrievalSet, RetrievalSettings, VideoTextOutputs
from fvc_lib.metrics.retrieval import RetrievalMetrics
from fvc_lib.services.atomic_files import atomic_output
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import write_table
from fvc_lib.services.task_tables import CAPTIONS, RETRIEVAL_RANKS

DIRECTIONS = ("video_to_text", "text_to_video")


def write_test_tables(
    paths: RunPaths, pairs: pl.DataFrame, outputs: VideoTextOutputs, tokenizer: TextTokenizer, config: RunConfig
) -> None:
    """Write ranks, captions and embeddings of the test ``pairs`` (VIDEO_TEXTS), whose outputs these are, in order.

    Without a contrastive loss there are no ranks and no embeddings, without a captioning loss no captions: their tables
    then have no rows.
    """
    retrieval = outputs.retrieval_set()
    ranks = pl.DataFrame(schema=_types(RETRIEVAL_RANKS))
    if retrieval is not None:
        settings = RetrievalSettings(config.recall_at, config.retrieval_memory_mb * 1_000_000)
        ranks = retrieval_ranks(pairs, retrieval, settings.metrics(retrieval))
    write_embeddings(paths.embeddings, retrieval)
    write_table(ranks, RETRIEVAL_RANKS, paths.retrieval_ranks)
    write_table(written_captions(pairs, outputs, tokenizer), CAPTIONS, paths.captions)


def retrieval_ranks(pairs: pl.DataFrame, retrieval: RetrievalSet, metrics: RetrievalMetrics) -> pl.DataFrame:
    """RETRIEVAL_RANKS of every video (``query_id`` is its id) and every text, each in the order of the embeddings.

    A text that stands beside videos of several groups is counted to the first of them by name.
    """
    first_group = dict(pairs.group_by("text_id").agg(pl.col("group_id").min()).iter_rows())
    videos, texts = pairs[retrieval.video_places.tolist()], pairs[retrieval.text_places.tolist()]
    queries = {
        "video_to_text": (videos["video_id"], videos["group_id"].to_list()),
        "text_to_video": (texts["text_id"], [first_group[text] for text in texts["text_id"]]),
    }
    tables = []
    for direction, (ids, groups) in queries.items():
        found = getattr(metrics, direction)
        columns = {
            "direction": [direction] * found.num_queries,
            "query_id": ids[found.query_indices.tolist()],
            "group_id": [groups[row] for row in found.query_indices.tolist()],
            "rank": found.ranks,
            "num_candidates": np.full(found.num_queries, found.num_candidates, dtype=np.int64),
            "num_positives": found.num_positives,
        }
        tables.append(pl.DataFrame(columns, schema=_types(RETRIEVAL_RANKS)))
    return pl.concat(tables)


def written_captions(pairs: pl.DataFrame, outputs: VideoTextOutputs, tokenizer: TextTokenizer) -> pl.DataFrame:
    """CAPTIONS of every video, in the order of the ids."""
    tokens = outputs.caption_tokens
    if tokens is None:
        return pl.DataFrame(schema=_types(CAPTIONS))
    captions = pl.Series("caption", [tokenizer.decode(row).strip() for row in tokens], dtype=pl.String)
    return (
        pairs.with_columns(captions)
        .group_by("video_id", maintain_order=True)
        .agg(
            pl.col("group_id").first(),
            pl.col("path").first(),
            pl.col("caption").first(),
            pl.col("text").unique(maintain_order=True).str.join("\n").alias("references"),
        )
        .sort("video_id")
    )


def write_embeddings(path: Path, retrieval: RetrievalSet | None) -> None:
    """Replace ``path`` atomically: ``video_embeddings``, ``text_embeddings`` and ``pairs``, see ``RetrievalSet``.

    Rows are in the order of the ids, which is that of RETRIEVAL_RANKS within each direction.
    """
    empty = torch.zeros(0, 0)
    tensors = {
        "video_embeddings": empty if retrieval is None else retrieval.video_embeddings.contiguous(),
        "text_embeddings": empty if retrieval is None else retrieval.text_embeddings.contiguous(),
        "pairs": torch.zeros(0, 2, dtype=torch.int64) if retrieval is None else torch.from_numpy(retrieval.pairs),
    }
    with atomic_output(path) as temporary:
        safetensors.torch.save_file(tensors, temporary)


def read_embeddings(path: Path) -> dict[str, torch.Tensor]:
    """What ``write_embeddings`` wrote.

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        tensors: dict[str, torch.Tensor] = safetensors.torch.load(path.read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(f"{path}: cannot be read as embeddings: {error}. Run 20_video_text again.") from error
    return tensors


def refuse_nonfinite(outputs: VideoTextOutputs) -> None:
    """Raise ``DataError`` where an embedding of the test part is no vector of numbers."""
    retrieval = outputs.retrieval_set()
    if retrieval is None or retrieval.is_finite:
        return
    lost = [
        outputs.sample_ids[place]
        for rows, places in (
            (retrieval.video_embeddings, retrieval.video_places),
            (retrieval.text_embeddings, retrieval.text_places),
        )
        for place in places[~rows.isfinite().all(1).numpy()].tolist()
    ]
    raise DataError(
        f"the network says nothing finite of {len(lost)} test videos or texts, the first in the pairs "
        f"{', '.join(lost[:5])}. Turn amp off, or train with a lower learning_rate."
    )


def _types(schema: object) -> dict[str, type[pl.DataType]]:
    columns = schema.columns  # type: ignore[attr-defined]  # a pandera schema, which polars knows nothing of
    return {name: column.dtype.type for name, column in columns.items()}
