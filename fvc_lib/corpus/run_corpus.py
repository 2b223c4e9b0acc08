"""Which corpus a run works on: the user's own, or the generated sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fvc_lib.corpus.sample import generate_sample_corpus
from fvc_lib.services.config import RunConfig


def run_corpus(config: RunConfig, *, progress: Callable[[int, int], None] | None = None) -> Path:
    """The corpus of ``config``; without one, the sample corpus, generated where it is not complete yet.

    Args:
        config: ``corpus`` names the user's; ``data_dir`` is where the sample lies.
        progress: called with (clips done, clips in all) while the sample is generated.

    Returns:
        A path that ``sources.read_corpus`` understands.
    """
    if config.corpus:
        return Path(config.corpus)
    return generate_sample_corpus(Path(config.data_dir) / "sample_corpus", progress=progress)
