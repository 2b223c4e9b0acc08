from __future__ import annotations

import numpy as np
from torch.utils.data import DataLoader

from fvc_lib.services.tables import AUGMENTED, read_table
from fvc_lib.tasks.video.streaming import StreamedClips
from fvc_lib.video.clips.shards import ClipShards, ClipStream, StreamPosition, write_shards


def test_loader_processes_give_each_clip_once_in_the_streams_order_and_resume(tiny_training):
    store = tiny_training.store
    clips = read_table(tiny_training.paths.augmented_metadata, AUGMENTED)
    folder = write_shards(store, clips, shard_bytes=60_000)
    seen = []
    for rank in (0, 1):
        stream = ClipStream(ClipShards(folder), 5, rank, 2)
        alone = list(StreamedClips(stream, StreamPosition(3)))
        loaded = list(DataLoader(StreamedClips(stream, StreamPosition(3)), batch_size=None, num_workers=2))
        rest = DataLoader(StreamedClips(stream, loaded[9].position), batch_size=None, num_workers=1)
        for got, wanted in ((loaded, alone), (list(rest), alone[10:])):
            assert [(clip.record, clip.position) for clip in got] == [(clip.record, clip.position) for clip in wanted]
        for clip in loaded:
            original = store.read(clip.record.video_id, clip.record.augmentation_index)
            np.testing.assert_array_equal(clip.frames, original)
        seen += [clip.record.clip_id for clip in loaded]
    assert sorted(seen) == sorted(clips["clip_id"])
