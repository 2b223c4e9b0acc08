"""Controls of a table of anyone's scores, without its videos and with them."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from fvc_lib.analysis.audit.numbers import Settings, audit_scores, group_ids
from fvc_lib.corpus.listing import read_corpus
from fvc_lib.corpus.score_table import FACTS, ScoreTable
from fvc_lib.services.parameters import resolve_config
from fvc_lib.tasks.video.table_controls import controls_of_scores, found_in_corpus
from tests.faults.small_runs import small_corpus


def table_of(ids: list[str], labels: list[str], groups: list[str | None]) -> ScoreTable:
    facts = {name: pl.lit(None, pl.String) for name in FACTS if name != "group_id"}
    columns = [pl.Series("video_id", ids), pl.Series("label", labels), pl.Series("group_id", groups, dtype=pl.String)]
    videos = pl.DataFrame(columns).with_columns(**facts).select("video_id", "label", *FACTS).sort("video_id")
    scores = pl.DataFrame({"one": np.random.default_rng(0).random(len(ids))})
    return ScoreTable(videos, scores)


def test_controls_stand_in_the_order_of_the_table_and_are_named_where_they_are_missing():
    ids = [f"v{number:02}" for number in range(40)]
    groups = [f"g{number // 2}" for number in range(40)]
    videos = table_of(ids, ["real", "real", "fake", "fake"] * 10, groups).videos
    found, missing = controls_of_scores(videos, group_ids(videos).tolist())
    assert set(found) == {"constant", "group_lookup_by_group", "group_lookup_by_row"}
    assert all(control["video_id"].to_list() == ids for control in found.values())
    assert ["--corpus" in line for line in missing] == [True]
    alone = videos.with_columns(group_id=pl.lit(None, pl.String))
    found, missing = controls_of_scores(alone, group_ids(alone).tolist())
    assert set(found) == {"constant"}
    assert "every video is a group of its own" in missing[0]


@pytest.mark.long
def test_with_the_videos_come_groups_metadata_and_clip_length(tmp_path):
    corpus = small_corpus("video", tmp_path / "corpus")
    entries = read_corpus(corpus).entries
    labels = [str(entry.label) for entry in entries]
    table = table_of([entry.path for entry in entries], labels, [None] * len(entries))
    config = resolve_config({"corpus": str(corpus), "cache_dir": str(tmp_path / "cache")})
    known, of_corpus = found_in_corpus(table, config, tmp_path / "audit")
    assert known.videos["group_id"].null_count() < table.videos.height
    assert of_corpus.height == table.videos.height
    found, missing = controls_of_scores(known.videos, group_ids(known.videos).tolist(), of_corpus)
    assert {"metadata_only", "length_only"} <= set(found)
    assert missing == []
    audit = audit_scores(known.videos, known.scores, Settings(replicates=100), controls=found)
    assert audit.controls["value"].is_not_null().all()
    fewer = of_corpus.head(of_corpus.height - 1)
    found, missing = controls_of_scores(known.videos, group_ids(known.videos).tolist(), fewer)
    assert found["metadata_only"]["score"].null_count() == 1
    assert "1 of" in missing[-1]
