from __future__ import annotations

from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fvc_lib.services.errors import DataError
from fvc_lib.video.augmentations import AugmentationSettings
from fvc_lib.video.clips.shards import (
    MANIFEST,
    ClipRecord,
    ClipShards,
    ClipStream,
    ShardEntry,
    ShardManifest,
    StreamPosition,
    member_names,
    write_shards,
)
from fvc_lib.video.clips.store import ClipStore

DIGEST = "0" * 64


def unread_shards(folder: Path, sizes: list[int]) -> ClipShards:
    """Shards of so many clips that exist in their manifest only: all that an order depends on."""
    entries = [
        ShardEntry(
            name=f"clips-{shard:06d}.tar", sha256=DIGEST, size_bytes=0,
            clips=tuple((f"v{shard}x{clip // 2}", clip % 2) for clip in range(size)),
        )
        for shard, size in enumerate(sizes)
    ]  # fmt: skip
    manifest = ShardManifest(shape=(1, 3, 16, 16), settings_hash="s", shards=tuple(entries))
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    return ClipShards(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


sizes = st.lists(st.integers(0, 9), max_size=7)


@given(sizes, st.integers(1, 6), st.integers(1, 4), st.integers(0, 3), st.integers(0, 99), st.booleans())
def test_the_ranks_of_an_epoch_together_give_every_clip_once(folder, sizes, world_size, at_once, epoch, seed, some):
    shards = unread_shards(folder, sizes)
    wanted = (lambda video_id, number: number == 0) if some else None
    streams = [ClipStream(shards, seed, rank, world_size, at_once, wanted) for rank in range(world_size)]
    orders = [stream.order(epoch).tolist() for stream in streams]
    given_out = [shards.clips[number] for order in orders for number in order]
    assert sorted(given_out) == sorted(clip for clip in shards.clips if not some or clip[1] == 0)
    assert [len(order) for order in orders] == [len(stream) for stream in streams]
    assert max(map(len, orders)) - min(map(len, orders)) <= 1


class Numbers(ClipShards):
    """Shards whose clips are their own numbers: what is streamed is seen without files."""

    def load_number(self, number: int):
        return np.array(number)

    def record_number(self, number: int) -> ClipRecord:
        video_id, copy = self.clips[number]
        return ClipRecord.model_construct(video_id=video_id, augmentation_index=copy)


def streamed(stream: ClipStream, start: StreamPosition, num_workers: int) -> list[tuple[int, StreamPosition]]:
    """What a loader gives that takes one clip of each worker in turn."""
    workers = [stream.clips(start, worker=worker, num_workers=num_workers) for worker in range(num_workers)]
    turns = chain.from_iterable(zip_longest(*workers))
    return [(int(clip.frames), clip.position) for clip in turns if clip is not None]


@given(sizes, st.integers(1, 3), st.integers(1, 5), st.data())
def test_workers_and_resuming_anywhere_change_nothing(folder, sizes, world_size, num_workers, data):
    unread_shards(folder, sizes)
    stream = ClipStream(Numbers(folder), 7, data.draw(st.integers(0, world_size - 1)), world_size)
    whole = streamed(stream, StreamPosition(2), 1)
    assert [number for number, _ in whole] == stream.order(2).tolist()
    assert [position for _, position in whole] == [StreamPosition(2, taken + 1) for taken in range(len(stream))]
    taken = data.draw(st.integers(0, len(stream)))
    assert streamed(stream, StreamPosition(2, taken), num_workers) == whole[taken:]


def test_epochs_and_seeds_differ_and_repeat(folder):
    shards = unread_shards(folder, [20, 20, 20])
    orders = {tuple(ClipStream(shards, seed).order(epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert tuple(ClipStream(shards, 1).order(1)) in orders


def test_clips_are_shuffled_among_neighbouring_shards_only(folder):
    """So that a rank reads few shards at once; with all shards at once every order is possible."""
    shards = unread_shards(folder, [10] * 6)
    order = ClipStream(shards, 0, shards_at_once=2).order(0)
    groups = [{shards.shard_of(number) for number in part} for part in np.split(order, 3)]
    assert [len(group) for group in groups] == [2, 2, 2]
    assert len(set().union(*groups)) == 6
    mixed = ClipStream(shards, 0, shards_at_once=6).order(0)
    assert len({shards.shard_of(number) for number in mixed[:20]}) > 2


@pytest.mark.parametrize("arguments", [(0, 2, 2), (0, -1, 2), (0, 0, 1, 0)])
def test_a_rank_that_is_none_is_refused(folder, arguments):
    with pytest.raises(ValueError, match="clip stream: got rank"):
        ClipStream(unread_shards(folder, [1]), *arguments)


def test_what_is_streamed_is_what_was_written_and_a_damaged_shard_gives_nothing(tmp_path):
    store = ClipStore(tmp_path, 1, 16, AugmentationSettings(()))
    rows = []
    for number in range(9):
        store.write(f"video{number}", 0, np.full(store.shape, number, np.uint8))
        rows.append((f"video{number}_0", f"video{number}", "g", "real", 0, "[]", store.settings_hash, "x"))
    clips = pl.DataFrame(rows, schema=list(ClipRecord.model_fields), orient="row")
    written = write_shards(store, clips, shard_bytes=3 * 1000)
    shards = ClipShards(written)
    assert len(shards.manifest.shards) == 3
    got = [(clip.record.clip_id, int(clip.frames.max())) for clip in ClipStream(shards, 0).clips(StreamPosition())]
    assert sorted(got) == [(f"video{number}_0", number) for number in range(9)]
    victim = shards.manifest.shards[0]
    path = written / victim.name
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    given_before = []
    with pytest.raises(DataError, match=victim.name):
        given_before.extend(
            (clip.record.video_id, 0)
            for clip in ClipStream(ClipShards(written), 0, shards_at_once=1).clips(StreamPosition())
        )
    assert not set(given_before) & set(victim.clips)


def test_members_are_named_by_plain_ids():
    assert member_names("abc", 2) == ("abc_2.npy", "abc_2.json")
    with pytest.raises(ValueError, match="plain id"):
        member_names("../abc", 2)
