"""Corpora of videos and texts: manifests, and the index of pairs."""

import hashlib
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import polars as pl
import pytest
from hypothesis import example, given, settings, strategies as st

from fvc_lib.corpus.corpus_files import Rejections
from fvc_lib.corpus.images import SplitIndex
from fvc_lib.corpus.probing import ProbeResult
from fvc_lib.corpus.video_texts import (
    PairListing,
    index_of,
    index_video_texts,
    read_pairs,
    video_text_root,
)
from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError
from fvc_lib.services.tables import REJECTED, VIDEO_TEXTS, check_table, read_table
from fvc_lib.video.decode.probe import VideoProbe
from tests.corpus.published import text, touch


def manifest_of(folder: Path, content: str | bytes, name: str = "manifest.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("separator", "content"),
    [
        (",", 'path,text\na.mp4,"one, two"\nb.mp4,three\n'),
        ("\\t", "path\ttext\na.mp4\tone, two\nb.mp4\tthree\n"),
        ("|", "path | text\n a.mp4 | one, two\nb.mp4 |three\n"),
        ("|||", "path ||| text\na.mp4 ||| one, two\n\nb.mp4|||three\n"),
        ("αβ", "pathαβtext\na.mp4αβone, two\nb.mp4αβthree\n"),
    ],
)
def test_any_separator_separates(separator, content, tmp_path):
    touch(tmp_path, "a.mp4", "b.mp4")
    listing = read_pairs(manifest_of(tmp_path, content.encode("utf-8-sig"), "list.txt"), separator)
    assert listing.rows.select("row", "path", "text").rows() == [(1, "a.mp4", "one, two"), (2, "b.mp4", "three")]
    assert listing.root == tmp_path


def test_rows_that_cannot_be_used_are_named_with_their_row(tmp_path):
    corpus = tmp_path / "corpus"
    touch(corpus, "a.mp4", b"\xff.mp4", "sub/b.mp4")
    touch(tmp_path, "secret.mp4")
    (corpus / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    lines = [
        b"path,text,split,group",
        b"a.mp4,fine,,",
        b"gone.mp4,x,,",
        b"../secret.mp4,x,,",
        b"link.mp4,x,,",
        b"/etc/passwd,x,,",
        b"sub,x,,",
        b",x,,",
        b"a.mp4, \t ,,",
        b"a.mp4,bad \xff bytes,,",
        b"a.mp4,x,holdout,",
        b"a.mp4,x",
        b"\xff.mp4,odd name,TEST,g\xff",
        f"{corpus}/sub/b.mp4, absolute ,Val,".encode(),
    ]
    listing = read_pairs(manifest_of(corpus, b"\n".join(lines)), ",")
    assert listing.rows.rows() == [
        (1, "a.mp4", "fine", None, None),
        (12, "\\xff.mp4", "odd name", "test", "g\\xff"),
        (13, "sub/b.mp4", "absolute", "validation", None),
    ]
    assert [(row[2], row[0], row[4]) for row in listing.rejections.rows] == [
        (2, "gone.mp4", "missing_video"),
        (3, "../secret.mp4", "outside_corpus"),
        (4, "link.mp4", "outside_corpus"),
        (5, "/etc/passwd", "outside_corpus"),
        (6, "sub", "not_a_file"),
        (7, "", "no_path"),
        (8, "a.mp4", "no_text"),
        (9, "a.mp4", "malformed_row"),
        (10, "a.mp4", "unknown_split"),
        (11, "", "malformed_row"),
    ]
    assert all(f"manifest.csv row {row[2]}: " in row[5] for row in listing.rejections.rows)


CONFIG = RunConfig(task="video_text")
PROBE = VideoProbe("h264", "mov", "yuv420p", 64, 64, 8.0, 12, 1.5, 0, False, 1000, None)


def probe_of(path: str, content: str | None = None, hashed: str | None = None) -> ProbeResult:
    return ProbeResult(path, PROBE, hashlib.sha256((content or path).encode()).hexdigest(), hashed)


def indexed(
    rows: Iterable[tuple[str, str, str | None, str | None]], probes: Iterable[ProbeResult] = (), **changes: object
) -> SplitIndex:
    """The index of rows (path, text, part, group) whose files were probed, by default with a content of their own."""
    schema = {"path": pl.String, "text": pl.String, "part": pl.String, "stated_group": pl.String}
    listed = pl.DataFrame(list(rows), schema=schema, orient="row").with_row_index("row", 1)
    memberships = tuple(sorted(set(listed.drop_nulls("stated_group").select("path", "stated_group").rows())))
    listing = PairListing(Path("/corpus"), listed, Rejections(), memberships)
    known = {path: probe_of(path) for path in listed["path"]} | {probe.path: probe for probe in probes}
    return index_of(listing, known, CONFIG.model_copy(update=changes))


def plain(count: int, part: str | None = None) -> list[tuple[str, str, str | None, str | None]]:
    return [(f"{part} {number}.mp4", f"text {number}", part, None) for number in range(count)]


SPLIT = [*plain(3, "train"), *plain(3, "validation"), *plain(3, "test")]


def test_equal_texts_are_one_and_a_video_may_have_several():
    index = indexed([("a", "x", "train", None), ("b", "x", "train", None), ("b", "y", "train", None), *SPLIT])
    pairs = index.rows.filter(pl.col("path").is_in(["a", "b"])).sort("path", "text")
    texts, videos = pairs["text_id"].to_list(), pairs["video_id"].to_list()
    assert texts[0] == texts[1] != texts[2]
    assert videos[0] != videos[1] == videos[2]
    assert pairs["pair_id"].to_list() == [f"{v}_{t}" for v, t in zip(videos, texts, strict=True)]
    assert pairs["group_id"].n_unique() == 2  # no group for a text
    assert set(index.rows["split_source"]) == {"official"}
    assert any("3 of 3 different test texts (3 of 3 pairs)" in note for note in index.notes)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 11), st.integers(0, 5), st.sampled_from([None, "g1", "g2"]), st.sampled_from([None, "train"])
        ),
        min_size=1, max_size=16,
    ),
    st.randoms(use_true_random=False),
)  # fmt: skip
@example([(0, 0, None, None), (0, 0, None, "train")], random.Random(1))  # one pair is listed with a part and without
@settings(max_examples=5)
def test_the_order_of_the_rows_does_not_matter_and_no_group_is_on_two_sides(drawn, order):
    """Twelve files, of which each two neighbours have one content."""
    rows = [(f"{file}.mp4", f"text {text}", part, group) for file, text, group, part in drawn]
    rows += plain(6, "test") + plain(6, "validation") + plain(3, "train")
    shuffled = order.sample(rows, len(rows))
    probes = [probe_of(f"{file}.mp4", f"content {file // 2}") for file in range(12)]
    first, *others = (indexed(some, probes) for some in (rows, shuffled, rows[::-1]))
    assert all(other.rows.equals(first.rows) and other.notes == first.notes for other in others)
    for column in ("group_id", "video_id", "content_sha256"):
        assert first.rows.group_by(column).agg(pl.col("part").n_unique())["part"].max() == 1
    assert first.rows.height + first.rejected.height == len(rows)
    assert check_table(first.rejected, REJECTED, "test").filter(pl.col("reason") != "duplicate_pair").is_empty()


def test_training_copies_of_what_is_tested_on_are_left_out_and_said():
    rows = [("copy", "x", "train", None), ("seen", "y", "validation", None), ("shown", "x", "test", None),
            ("unsaid", "z", None, None), *SPLIT]  # fmt: skip
    index = indexed(rows, [probe_of(path, "same") for path in ("copy", "seen", "shown", "unsaid")])
    assert index.rejected.select("path", "row", "reason").rows() == [
        ("copy", 1, "copy_across_split"), ("seen", 2, "copy_across_split"),
    ]  # fmt: skip
    kept = index.rows.filter(content_sha256=hashlib.sha256(b"same").hexdigest())
    assert kept.select("path", "text", "part").sort("text").rows() == [("shown", "x", "test"), ("shown", "z", "test")]


@pytest.mark.parametrize(
    "rows",
    [
        [("a", "x", "train", "event"), ("b", "y", "test", "event")],
        [("a", "x", "train", None), ("a", "y", "test", None)],
    ],
)
def test_a_split_that_contradicts_its_own_groups_stops_the_run(rows):
    with pytest.raises(LeakageError, match="1 groups are in more than one part"):
        indexed([*rows, *SPLIT])


def test_unreadable_files_are_rejected_row_by_row_and_counted():
    damaged = ProbeResult("a", reason="corrupt", detail="its frames are damaged. Fetch it again.")
    index = indexed([("a", "x", "train", None), ("a", "y", "train", None), *SPLIT], [damaged])
    assert index.rejected.select("path", "row", "reason", "detail").rows() == [
        ("a", 1, "corrupt", damaged.detail), ("a", 2, "corrupt", damaged.detail),
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"18% of the pairs cannot be used, at most 10% .*\(2 x corrupt\).*damaged"):
        indexed([("a", "x", "train", None), ("a", "y", "train", None), *SPLIT], [damaged], max_rejected_share=0.1)
    with pytest.raises(DataError, match="no usable pair"):
        indexed([("a", "x", None, None)], [damaged], max_rejected_share=1.0)


def test_a_corpus_with_everything_that_can_be_wrong(tmp_path: Path, make_video: Callable[..., Path]) -> None:
    root = tmp_path / "corpus"
    for number in range(3):
        make_video(root / f"{number}.mp4", 30 + number)
    make_video(root / "near 0.mp4", 30, crf=30)  # the same pictures, encoded again
    shutil.copy(root / "1.mp4", root / "same 1.mp4")
    (root / "broken.mp4").write_bytes((root / "2.mp4").read_bytes()[:200])
    lines = ["video ||| caption ||| split", "0.mp4 ||| a  b ||| test", "near 0.mp4 ||| c ||| train",
             "1.mp4 ||| a b ||| train", "same 1.mp4 ||| d ||| ", "2.mp4 ||| e ||| val", "gone.mp4 ||| f ||| val",
             "broken.mp4 ||| g ||| train"]  # fmt: skip
    text(root, "manifest.csv", lines)
    config = CONFIG.model_copy(
        update={"corpus": str(root), "manifest_separator": "|||", "cache_dir": str(tmp_path / "cache"), "workers": 1}
    )
    seen: list[tuple[int, int]] = []
    index = index_video_texts(config, progress=lambda *done: seen.append(done))
    assert seen[-1] == (6, 6)
    table = tmp_path / "rejected.parquet"
    with pytest.raises(DataError, match=r"Why each of 2 rows is not used stands in .*rejected\.parquet"):
        index_video_texts(config.model_copy(update={"max_rejected_share": 0.1}), rejected_path=table)
    assert set(read_table(table, REJECTED)["path"]) == {"broken.mp4", "gone.mp4"}
    assert index.root == video_text_root(config) == root
    check_table(index.rows, VIDEO_TEXTS, "test")
    assert index.rows.select("path", "text", "part").sort("path", "text").rows() == [
        ("0.mp4", "a b", "test"), ("1.mp4", "a b", "train"), ("1.mp4", "d", "train"), ("2.mp4", "e", "validation"),
    ]  # fmt: skip
    assert dict(index.rejected.select("path", "reason").iter_rows()) == {
        "broken.mp4": "unreadable", "gone.mp4": "missing_video", "near 0.mp4": "copy_across_split",
    }  # fmt: skip
    row, content = index.rows.row(by_predicate=pl.col("path") == "0.mp4", named=True), sha256_of_file(root / "0.mp4")
    assert (row["content_sha256"], row["video_id"], row["num_frames"]) == (content, content[:16], 8)
