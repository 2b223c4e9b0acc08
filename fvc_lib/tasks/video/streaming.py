"""Shards read one after the other by torch's loader, with the same sequence for any number of loader processes."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import IterableDataset, get_worker_info

from fvc_lib.video.clips.shards import ClipStream, StreamedClip, StreamPosition


class StreamedClips(IterableDataset[StreamedClip]):
    """The rest of one epoch of a rank's stream, from ``start`` on.

    For ``DataLoader(..., batch_size=None)``: it takes one clip of each process in turn, which is the order of the
    stream itself. The position of the last clip that was used is what to save; a new object with it goes on there.
    """

    def __init__(self, stream: ClipStream, start: StreamPosition) -> None:
        self.stream = stream
        self.start = start

    def __len__(self) -> int:
        return len(self.stream) - self.start.taken

    def __iter__(self) -> Iterator[StreamedClip]:
        worker = get_worker_info()
        if worker is None:
            return self.stream.clips(self.start)
        return self.stream.clips(self.start, worker=worker.id, num_workers=worker.num_workers)
