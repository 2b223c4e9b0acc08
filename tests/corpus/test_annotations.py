"""Indexes of label tables whose videos are not here."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fvc_lib.corpus.folds import make_folds, most_folds
from fvc_lib.corpus.index import undisputed_labels
from fvc_lib.metrics.classification import roc_auc
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import ANNOTATIONS, read_table
from fvc_lib.tasks.video.controls import fake_labels, group_lookup, split_by_row
from tests.corpus.indexing import index_of

SHARED = Path(__file__).resolve().parents[3] / "shared" / "fvc2018"


def url(name: str) -> str:
    return f"https://www.youtube.com/watch?v={name:a<11}"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Four cascades in nine rows: one source in two of them, one label that is not used, two URLs of no video."""
    folder = tmp_path / "corpus"
    (folder / "videos").mkdir(parents=True)
    seeds = [("f1", url("one"), "fake"), ("f2", url("two"), "fake"), ("r1", url("three"), "Real"), (" ", "n/a", "real")]
    copies = [
        ("f1", url("four"), "fake"), ("f2", url("four"), "fake"), ("r1", url("five"), "debunked"),
        ("r2", "n/a", "real"), ("", url("six"), ""),
    ]  # fmt: skip
    for name, rows in (("FVC.csv", seeds), ("FVC_dup.csv", copies)):
        text = "".join(f"{','.join(row)}\n" for row in [("cascade_id", "video_url", "label"), *rows])
        (folder / name).write_text(text)
    return folder


def test_every_row_is_kept_with_its_group_and_nothing_is_opened(corpus: Path, tmp_path: Path) -> None:
    (corpus / "videos/oneaaaaaaaa.mp4").write_bytes(b"no video")
    (corpus / "videos/fiveaaaaaaa.mp4").write_bytes(b"no video")
    indexed = index_of(corpus, tmp_path / "out", annotations_only=True)
    assert indexed.annotations.select("origin", "row", "source_id", "label", "group_id", "is_present").rows() == [
        ("FVC.csv", 1, "oneaaaaaaaa", "fake", "f1+1 more", True),
        ("FVC.csv", 2, "twoaaaaaaaa", "fake", "f1+1 more", False),
        ("FVC.csv", 3, "threeaaaaaa", "real", "r1", False),
        ("FVC.csv", 4, "FVC.csv row 4", "real", "source FVC.csv row 4", False),
        ("FVC_dup.csv", 1, "fouraaaaaaa", "fake", "f1+1 more", False),
        ("FVC_dup.csv", 2, "fouraaaaaaa", "fake", "f1+1 more", False),
        ("FVC_dup.csv", 3, "fiveaaaaaaa", "debunked", "r1", True),
        ("FVC_dup.csv", 4, "FVC_dup.csv row 4", "real", "r2", False),
        ("FVC_dup.csv", 5, "sixaaaaaaaa", None, "source sixaaaaaaaa", False),
    ]
    with pytest.raises(DataError, match="made from annotations only"):
        make_folds(indexed.index, 5, 0)
    assert indexed.group_links.rows() == [("f1+1 more", "same_source", "fouraaaaaaa", "f1", "f2")]
    assert Counter(indexed.rejected["reason"]) == {
        "missing_video": 3, "duplicate_path": 1, "label_not_used": 2, "unknown_url": 2, "not_opened": 1,
    }  # fmt: skip
    assert indexed.rejected.height == indexed.annotations.height
    assert dict(indexed.report.summary.rows())["rows of the label source"] == "9"


def test_without_videos_the_error_names_the_way_to_index_annotations(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="-p annotations_only true"):
        index_of(corpus, tmp_path / "out")
    assert read_table(tmp_path / "out/annotations.parquet", ANNOTATIONS).height == 9


def test_recognising_the_group_of_the_real_tables_is_all_by_row_and_nothing_by_group(tmp_path: Path) -> None:
    if not SHARED.is_dir():
        pytest.skip(f"needs the label tables in {SHARED}")
    indexed = index_of(SHARED, tmp_path, annotations_only=True)
    assert (indexed.annotations.height, indexed.index.height) == (5579, 0)
    assert set(indexed.annotations["source_id"]) == set(indexed.rejected["source_id"])
    labelled = undisputed_labels(indexed.annotations)
    assert most_folds(labelled) > 100
    folds = make_folds(labelled, 5, 0)
    aucs = []
    for dealt in (split_by_row(folds, seed=0), folds):
        oracle = group_lookup(dealt)
        aucs.append(float(within_folds(roc_auc, oracle["fold"])(fake_labels(oracle), oracle["score"].to_numpy())))
    assert aucs[0] > 0.99
    assert np.isclose(aucs[1], 0.5, atol=0.01)
