"""Clips of videos with texts, and the samples made of them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from fvc_lib.detectors.texts.tokenizer import TextTokenizer
from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, StoppedError
from fvc_lib.services.tables import VIDEO_TEXTS, check_table, frame_of
from fvc_lib.tasks.video_text.task import VideoTextDataset, numbered
from fvc_lib.tasks.video_text.training import make_clips
from fvc_lib.video.clips.store import ClipStore
from fvc_lib.video.decode.clip import decode_clip

TEXTS = {"t0": "a red ring", "t1": "a blue ring 🙂", "t2": "something else"}
# (video, text): the first text stands beside two videos, the second video beside two texts.
PAIRS = ((0, "t0", "train"), (1, "t0", "train"), (1, "t1", "train"), (2, "t2", "test"), (3, "t1", "test"))


class Corpus:
    """Four videos, the table of their pairs, and their clips."""

    def __init__(self, folder: Path, make_video: Callable[..., Path]) -> None:
        self.root = folder / "corpus"
        self.paths = [make_video(self.root / f"video {number}.mp4", 20 + number) for number in range(4)]
        (self.root / "manifest.csv").write_text("path,text\n")
        self.config = RunConfig(
            task="video_text", corpus=str(self.root), cache_dir=str(folder / "cache"), num_frames=3, fixed_size=16,
            workers=1,
        )  # fmt: skip
        hashes = [sha256_of_file(path) for path in self.paths]
        self.video_ids = [digest[:16] for digest in hashes]
        rows = [
            (f"{hashes[video][:16]}_{text}", hashes[video][:16], self.paths[video].name, text, TEXTS[text],
             f"group {video}", part, "made", 8, None, hashes[video])
            for video, text, part in PAIRS
        ]  # fmt: skip
        self.pairs = numbered(check_table(frame_of(rows, VIDEO_TEXTS), VIDEO_TEXTS, "test"))
        assert make_clips(self.config, self.pairs) == []
        self.store, self.tokenizer = ClipStore.of(self.config), TextTokenizer.train(TEXTS.values(), 300)

    def clip(self, video_id: str) -> list[list[int]]:
        frames = np.empty(self.store.shape, np.uint8)
        self.store.load(video_id, 0, frames)
        return frames.tolist()

    def batch(self, pairs: pl.DataFrame, *indices: int):
        return VideoTextDataset(self.store, pairs, self.tokenizer, 12).__getitems__(indices)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, make_video: Callable[..., Path]) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("video_texts"), make_video)


def test_clips_are_made_once_and_are_the_originals(made):
    before = {path: path.stat().st_mtime_ns for path in Path(made.config.cache_dir).rglob("*.npy")}
    assert len(before) == 4
    seen = []
    make_clips(made.config, made.pairs, progress=lambda *done: seen.append(done))
    assert seen[-1] == (4, 4)
    assert {path: path.stat().st_mtime_ns for path in Path(made.config.cache_dir).rglob("*.npy")} == before
    assert made.clip(made.video_ids[2]) == decode_clip(made.paths[2], 3, 16).frames.tolist()


def test_a_sample_is_the_clip_the_tokens_and_the_numbers(made):
    batch = made.batch(made.pairs, *range(5))
    assert batch.sample_ids == tuple(made.pairs["pair_id"])
    assert {name: (t.dtype, tuple(t.shape)) for name, t in batch.tensors.items()} == {
        "frames": (torch.uint8, (5, 3, 3, 16, 16)),
        "tokens": (torch.int64, (5, 12)),
        "video_index": (torch.int64, (5,)),
        "text_index": (torch.int64, (5,)),
    }
    assert batch.tensors["frames"].tolist() == [made.clip(video_id) for video_id in made.pairs["video_id"]]
    assert batch.tensors["tokens"].equal(made.tokenizer.encode(made.pairs["text"].to_list(), 12))
    videos = batch.tensors["video_index"].tolist()
    assert batch.tensors["text_index"].tolist() == [0, 0, 1, 2, 1]
    assert [videos[1] == videos[2], len(set(videos)), min(videos), max(videos)] == [True, 4, 0, 3]
    # Numbers of a part are those of the whole table.
    test = made.batch(made.pairs.filter(part="test"), 0, 1)
    assert all(rows[3:].equal(test.tensors[name]) for name, rows in batch.tensors.items())
    shuffled = made.pairs.sample(fraction=1, shuffle=True, seed=1)
    assert numbered(shuffled).sort("pair_id").equals(made.pairs.sort("pair_id"))


def test_videos_that_cannot_be_decoded_are_named_and_left_out(tmp_path, made, caplog):
    root = Path(shutil.copytree(made.root, tmp_path / "copy"))
    (root / made.paths[1].name).write_bytes(b"changed since it was indexed")
    (root / made.paths[3].name).unlink()
    config = made.config.model_copy(update={"corpus": str(root), "cache_dir": str(tmp_path / "cache")})
    missing = make_clips(config, made.pairs)
    assert missing == sorted([made.video_ids[1], made.video_ids[3]])
    assert all(video_id in caplog.text for video_id in missing)
    assert "content has changed" in caplog.text
    with pytest.raises(DataError, match="2 of 4 videos have no clip"):
        make_clips(config.model_copy(update={"max_rejected_share": 0.4}), made.pairs)


def test_a_stopped_making_keeps_what_was_made(tmp_path, made):
    config, done = made.config.model_copy(update={"cache_dir": str(tmp_path)}), []
    with pytest.raises(StoppedError, match="1 of 4"):
        make_clips(config, made.pairs, progress=lambda *so_far: done.append(so_far), stop=lambda: True)
    assert done == [(1, 4)]
    assert len(list(tmp_path.rglob("*.npy"))) >= 1
    assert make_clips(config, made.pairs) == []
