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
    stems = [path.partition(".")[0] for path in paths]
    part = [parts.get(stem, stem.partition("_")[0]) for stem in stems]
    hashes = [sha256_of_file(root / path) for path in paths]
    return pl.DataFrame({"path": paths, "part": part, "group_id": paths, "content_sha256": hashes})


def failed(rows, root, task="image"):
    """The failed checks by name: the finding's number and text."""
    config = resolve_config({"task": task, "cache_dir": str(root.parent / "cache")}, environ={})
    found = split_audit(rows, root, config)
    assert tuple(found["check"]) == CHECKS
    wrong = found.filter(pl.col("passed").ne_missing(True)).to_dicts()
    return {row["check"]: (row["count"], row["finding"]) for row in wrong}


def test_each_kind_of_leak_is_found_by_its_own_check_though_the_groups_know_nothing(corpus, dishes):
    assert not failed(table(corpus), corpus)
    shutil.copy(corpus / "train.jpg", corpus / "test_same.jpg")
    assert failed(table(corpus), corpus).keys() == {"contents_in_two_parts", "near_copies_in_two_parts"}
    (corpus / "test_same.jpg").unlink()

    put_picture(corpus / "test_alike.jpg", saved_anew(dishes[0].resize((200, 200)), 60))
    ((check, (count, finding)),) = failed(table(corpus), corpus).items()
    assert (check, count) == ("near_copies_in_two_parts", 1)
    assert "('test_alike.jpg', 'train.jpg')" in finding
    assert not failed(table(corpus, test_alike="train"), corpus)
    divided = table(corpus, test_alike="train").with_columns(group_id=pl.lit("one"))
    assert failed(divided, corpus).keys() == {"groups_in_two_parts"}

    images = table(corpus, test_alike="train")  # files that are others by now, or gone
    put_picture(corpus / "test.jpg", dishes[0])
    (corpus / "validation.jpg").unlink()
    found = failed(images, corpus)
    assert found.keys() == {"contents_in_two_parts", "near_copies_in_two_parts", "files_unlike_the_index"}
    assert found["files_unlike_the_index"][0] == 2


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
    assert not failed(pairs, tmp_path, "video_text")
    moved = pairs.with_columns(part=pl.when(pl.col("path") == "c").then(pl.lit("test")).otherwise("part"))
    found = failed(moved.sample(fraction=1, shuffle=True, seed=1), tmp_path, "video_text")
    assert found.keys() == {"groups_in_two_parts", "contents_in_two_parts"}
    assert found["contents_in_two_parts"][1] == "1 of 3 contents in more than one part."
