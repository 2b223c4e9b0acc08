"""Leaks from one part of a split to another are counted from the files themselves, whatever the groups say."""

import shutil

import polars as pl
import pytest

from fvc_lib.corpus.probing import ProbeResult
from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.parameters import resolve_config
from fvc_lib.tasks import leakage_audit
from fvc_lib.tasks.leakage_audit import split_audit
from fvc_lib.video.decode.probe import VideoProbe
from tests.corpus.edited_pictures import drawn, put_picture, saved_anew

CHECKS = (
    "groups_in_two_parts", "files_in_two_parts", "contents_in_two_parts", "files_unlike_the_index",
    "near_copies_in_two_parts",
)  # fmt: skip
PROBE = VideoProbe("h264", "mov", "yuv420p", 64, 64, 8.0, 12, 1.5, 0, False, 1000, None)


@pytest.fixture(scope="module")
def dishes():
    return drawn(3)


@pytest.fixture
def corpus(tmp_path, dishes):
    for name, picture in zip(("train", "validation", "test"), dishes, strict=True):
        put_picture(tmp_path / f"corpus/{name}.jpg", picture)
    return tmp_path / "corpus"


def table(root, **parts):
    """Files with the part each is in, by the first word of its name; every file a group of its own."""
    paths = sorted(path.name for path in root.iterdir())
    columns = {
        "path": paths,
        "part": [parts.get(path.partition(".")[0], path.partition("_")[0].partition(".")[0]) for path in paths],
        "group_id": paths,
        "content_sha256": [sha256_of_file(root / path) for path in paths],
    }
    return pl.DataFrame(columns)


def audit(images, root, tmp_path, **changes):
    config = resolve_config({"task": "image", "cache_dir": str(tmp_path / "cache"), **changes}, environ={})
    found = split_audit(images, root, config)
    assert tuple(found["check"]) == CHECKS
    return {row["check"]: row for row in found.iter_rows(named=True)}


def failed(found):
    return {check for check, row in found.items() if row["passed"] is False}


def test_each_kind_of_leak_is_found_by_its_own_check_though_the_groups_know_nothing(corpus, tmp_path, dishes):
    assert [row["passed"] for row in audit(table(corpus), corpus, tmp_path).values()] == [True] * 5
    shutil.copy(corpus / "train.jpg", corpus / "test_same.jpg")
    found = audit(table(corpus), corpus, tmp_path)
    assert failed(found) == {"contents_in_two_parts", "near_copies_in_two_parts"}
    (corpus / "test_same.jpg").unlink()

    put_picture(corpus / "test_alike.jpg", saved_anew(dishes[0].resize((200, 200)), 60))
    found = audit(table(corpus), corpus, tmp_path)
    assert failed(found) == {"near_copies_in_two_parts"}
    assert found["near_copies_in_two_parts"]["count"] == 1
    assert "('test_alike.jpg', 'train.jpg')" in found["near_copies_in_two_parts"]["finding"]
    assert failed(audit(table(corpus, test_alike="train"), corpus, tmp_path)) == set()

    divided = table(corpus, test_alike="train").with_columns(group_id=pl.lit("one"))
    assert failed(audit(divided, corpus, tmp_path)) == {"groups_in_two_parts"}


def test_a_file_that_is_another_by_now_or_gone_is_said(corpus, tmp_path, dishes):
    images = table(corpus)
    put_picture(corpus / "test.jpg", dishes[0])
    (corpus / "validation.jpg").unlink()
    found = audit(images, corpus, tmp_path)
    assert failed(found) == {"contents_in_two_parts", "near_copies_in_two_parts", "files_unlike_the_index"}
    assert found["files_unlike_the_index"]["count"] == 2


def test_a_video_with_several_texts_counts_once_and_its_copies_are_found(tmp_path, monkeypatch):
    contents = {"a": "1", "b": "2", "c": "1", "d": "4"}
    probes = {path: ProbeResult(path, PROBE, 64 * content) for path, content in contents.items()}
    monkeypatch.setattr(leakage_audit, "probe_files", lambda *_, **__: (probes, 0))
    pairs = pl.DataFrame(
        {
            "path": list("aabcd"), "text": list("vwxyz"), "part": ["train", "train", "test", "train", "test"],
            "group_id": list("gghgi"), "content_sha256": [64 * contents[path] for path in "aabcd"],
        }
    )  # fmt: skip
    config = resolve_config({"task": "video_text"}, environ={})
    found = split_audit(pairs, tmp_path, config)
    assert found["passed"].to_list() == [True] * 5
    assert found["finding"][1] == "0 of 4 files in more than one part."
    moved = pairs.with_columns(part=pl.when(pl.col("path") == "c").then(pl.lit("test")).otherwise("part"))
    found = split_audit(moved.sample(fraction=1, shuffle=True, seed=1), tmp_path, config)
    assert dict(zip(found["check"], found["passed"], strict=True)) == {
        **dict.fromkeys(CHECKS, True), "groups_in_two_parts": False, "contents_in_two_parts": False
    }  # fmt: skip
