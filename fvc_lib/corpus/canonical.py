"""What is measured of a corpus after every video has gone through one encoding, so that containers tell nothing."""

from collections.abc import Callable, Mapping
from pathlib import Path

from fvc_lib.corpus.probing import VIDEO_FILES, ProbeResult, probe_files
from fvc_lib.services.atomic_files import AnyPath
from fvc_lib.video.reencode import reencode_files, reencoded_path

CANONICAL = "canonical"  # the recipe


def measured_again(
    sources: Mapping[str, Path],
    cache_dir: AnyPath,
    work_dir: AnyPath,
    *,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, ProbeResult]:
    """The facts of each video's re-encoded file, or the reason ``not_reencoded`` with why there is none.

    The files are kept in ``cache_dir`` by content and recipe (``video.reencode``).

    Args:
        sources: a file of each content, by the content's hash; so no two processes write the same file.
        cache_dir: where re-encoded files are kept.
        work_dir: where probe results are kept.
        workers: processes; 0: one per core.
        progress: called with (done, total) after each file that was re-encoded.

    Raises:
        UsageError: this PyAV has no H.264 encoder.
        OSError: a file cannot be written.
    """
    content_of, lost = {path: content for content, path in sources.items()}, {}
    for done, made in enumerate(reencode_files(list(content_of), CANONICAL, cache_dir, workers=workers), start=1):
        if made.path is None:
            lost[content_of[made.source]] = f"{made.reason}: {made.detail}"
        if progress is not None:
            progress(done, len(sources))
    root = Path(cache_dir)
    names = {
        content: reencoded_path(content, CANONICAL, root).relative_to(root).as_posix()
        for content in sources
        if content not in lost
    }
    found, _ = probe_files(VIDEO_FILES, root, list(names.values()), work_dir, workers=workers)
    for content, name in names.items():
        if found[name].probe is None:
            lost[content] = f"{found[name].reason}: {found[name].detail}"
    failed = {content: ProbeResult("", reason="not_reencoded", detail=why) for content, why in lost.items()}
    return {content: found[name] for content, name in names.items()} | failed
