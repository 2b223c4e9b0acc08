"""Published corpora through the whole pipeline: index, folds, clips, a training of each fold, results and audit."""

from collections.abc import Callable
from pathlib import Path

import av
import polars as pl
import pytest

from fvc_lib.analysis.read.headline import run_headline
from fvc_lib.corpus.index import build_index
from fvc_lib.corpus.protocols import protocol as protocols
from fvc_lib.corpus.samples.videos import corpus_root
from fvc_lib.execution.run.record import begin_run, record_corpus
from fvc_lib.services.config import RunConfig
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.registry import CORPORA
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import (
    AUGMENTED,
    FOLDS,
    GROUP_LINKS,
    INDEX,
    LEAKAGE_AUDIT,
    PREDICTIONS,
    PROTOCOL,
    RESULTS,
    read_table,
    write_table,
)  # fmt: skip
from fvc_lib.tasks.leakage_audit import leakage_audit
from fvc_lib.tasks.video.controls import tells_labels
from fvc_lib.tasks.video.results import kfold_results, slice_table
from fvc_lib.tasks.video.training import train_fold
from fvc_lib.video.clips.making import make_clips
from fvc_lib.video.clips.store import ClipStore
from tests.corpus.crowds import CROWDS

TINY = {
    "model": "frame_cnn", "num_frames": 2, "fixed_size": 16, "epochs": 1, "num_folds": 2, "augmentations_per_video": 0,
    "effective_batch_size": 8, "bootstrap_replicates": 100, "memory_preflight": False, "shuffled_label_control": False,
    "device": "cpu", "amp": "off",
}  # fmt: skip


def crowd(name: str, root: Path, make_video: Callable[..., Path]) -> Path:
    """The layout with a video of its own in each place; of WildDeepfake its frames as pictures."""
    CROWDS[name](root)
    for seed, path in enumerate(sorted(root.rglob("*.mp4"))):
        make_video(path, seed)
        if name == "wilddeepfake":
            with av.open(str(path)) as container:
                for number, frame in enumerate(container.decode(video=0)):
                    frame.to_image().save(path.parent / f"{number}.png")
            path.unlink()
    return root


def indexed(config: RunConfig, run: RunPaths) -> pl.DataFrame:
    """What 01 and 02 write."""
    run.index.parent.mkdir(parents=True, exist_ok=True)
    build_index(
        config.corpus, more_corpora=config.more_corpora, index_path=run.index, rejected_path=run.rejected,
        group_links_path=run.group_links, work_dir=Path(config.cache_dir) / "index", workers=1,
        near_duplicate_bits=config.near_duplicate_bits, max_rejected_share=config.max_rejected_share,
    )  # fmt: skip
    index = read_table(run.index, INDEX)
    table = protocols.make_protocol(index, config, tells_labels(config))
    protocols.check_protocol(table, index, config.num_trainings)
    write_table(table, PROTOCOL, run.protocol)
    write_table(protocols.folds_tested(table), FOLDS, run.folds)
    record_corpus(run)
    return index


def begun(name: str, folder: Path, make_video: Callable[..., Path]) -> tuple[RunConfig, RunPaths]:
    values = {"corpus": str(crowd(name, folder / "corpus", make_video))}
    if name == "deeperforensics":
        values |= {"more_corpora": [values["corpus"]]}
        values["corpus"] = str(crowd("faceforensics", folder / "originals", make_video))
    places = {f"{place}_dir": str(folder / place) for place in ("runs", "cache", "data")}
    config = resolve_config({**TINY, **values, **places}, environ={})
    return config, begin_run(config, command="a test")


def test_a_published_corpus_is_indexed_and_dealt_to_folds_by_its_people(make_video, tmp_path):
    config, run = begun("fakeavceleb", tmp_path, make_video)
    index = indexed(config, run)
    assert index["corpus"].unique().to_list() == ["FakeAVCeleb"]
    assert index.height == 36
    folds = read_table(run.folds, FOLDS).join(index, on="video_id")
    people = folds.group_by(pl.col("path").str.extract(r"/(id\d+)/")).agg(pl.col("fold").n_unique())
    assert people["fold"].to_list() == [1] * 12
    slices = slice_table(index, _guessed(folds), config)
    assert {"race", "sex", "audio", "real_source"} - set(slices["slice_by"]) == {"real_source"}


def _guessed(folds: pl.DataFrame) -> pl.DataFrame:
    half = pl.lit(0.5)
    return folds.select("video_id", "group_id", "label", "fold").with_columns(
        score=half, threshold=half, logit=pl.lit(0.0), temperature=pl.lit(1.0),
        control_score=pl.lit(None, pl.Float64), control_label=pl.lit(None, pl.String),
        source_score=pl.lit(None, pl.Float64), source_label=pl.lit(None, pl.Int64),
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", CROWDS)
def test_each_corpus_goes_through_the_whole_pipeline(name, make_video, tmp_path, list_log):
    config, run = begun(name, tmp_path, make_video)
    index = indexed(config, run)
    made = make_clips(ClipStore.of(config), index, corpus_root(config), 0, run.augmented_metadata, workers=1)
    assert made.failed == ()
    for fold in range(2):
        outcome = train_fold(run, config, fold, metric_log=list_log())
        assert outcome.training is not None
    predictions = pl.concat([read_table(run.predictions(fold), PREDICTIONS) for fold in range(2)])
    # Content that two corpora share takes part once: DeeperForensics' reals are FaceForensics++'s.
    tested = predictions.join(index.select("video_id", "content_sha256"), on="video_id")["content_sha256"]
    assert sorted(tested) == sorted(index["content_sha256"].unique())
    folds, links = read_table(run.folds, FOLDS), read_table(run.group_links, GROUP_LINKS)
    write_table(kfold_results(index, folds, predictions, config), RESULTS, run.results)
    augmented = read_table(run.augmented_metadata, AUGMENTED)
    audit = leakage_audit(index, folds, predictions, links, config, augmented=augmented)
    write_table(audit, LEAKAGE_AUDIT, run.leakage_audit)
    assert audit["passed"].drop_nulls().all(), audit.filter(~pl.col("passed"))["finding"].to_list()
    headline = run_headline(run)
    assert headline.num_samples == predictions.height
    known = {loader.name: loader.corpus for _, loader in CORPORA.items()}
    for layout, corpus in index.select("label_source", "corpus").unique().iter_rows():
        assert corpus == ("DFD" if name == "dfd" else known[layout] or "corpus")
        assert corpus in (headline.corpus or "")
