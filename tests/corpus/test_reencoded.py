"""A trace of container, size or rate that tells the labels is gone after re-encoding, and nothing else is."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import polars as pl
import pytest
from PIL import Image

from fvc_lib.corpus.index import trial_groups
from fvc_lib.metrics.classification import roc_auc
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import INDEX, read_table, write_table
from fvc_lib.tasks.decoding import FileToScore, item_to_decode
from fvc_lib.tasks.video import controls
from fvc_lib.tasks.video.predicting import index_of_files
from fvc_lib.tasks.video.verdicts.unfamiliar import training_ranges
from fvc_lib.video.clips.making import make_clips
from fvc_lib.video.clips.store import ClipStore
from fvc_lib.video.clips.worker import make_original
from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.probe import probe_video
from fvc_lib.video.reencode import reencoded
from tests.corpus.indexing import index_of

PLAIN = {"near_duplicate_bits": 0, "max_rejected_share": 0, "workers": 2}


def write_video(path: Path, frames: Iterable[np.ndarray], rate: int, **options: str) -> None:
    """Encode RGB frames, uint8 (H, W, 3); no bit is lost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=rate)
        stream.codec_context.options = {"qp": "0", **options}
        for pixels in frames:
            if not stream.codec_context.is_open:
                stream.height, stream.width, stream.pix_fmt = *pixels.shape[:2], "yuv420p"
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


# --- Fakes have closer keyframes and no B-frames.


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pl.DataFrame]:
    """Indexes of pairs of a real and a fake with the same sixteen frames."""
    folder = tmp_path_factory.mktemp("canonical")
    for number in range(16):
        cells = np.random.default_rng(number // 2).integers(30, 220, (9, 9, 3))
        picture = np.kron(cells, np.ones((16, 16, 1))).astype(np.uint8)
        frames = [picture[step : step + 64, 2 * step : 2 * step + 96] for step in range(16)]
        options = {"g": "2", "bf": "0"} if number % 2 else {"g": "8", "bf": "2"}
        write_video(folder / "corpus" / ("fake" if number % 2 else "real") / f"{number}.mp4", frames, 10, **options)
    indexes = {"plain": {}, "canonical": {"canonical": True}, "trial": {"dev_groups": 5, "seed": 3}}
    made = {name: index_of(folder / "corpus", folder / "out", **PLAIN, **options) for name, options in indexes.items()}
    return {name: each.index for name, each in made.items()} | {"rejected": made["trial"].rejected}


def auc(index: pl.DataFrame, names: tuple[str, ...]) -> float:
    number = pl.col("path").str.extract(r"(\d+)").cast(pl.Int64)
    folds = index.select("video_id", "group_id", "label", fold=number // 2 % 4)
    scored = controls.metadata_only(index, folds, names)
    return float(within_folds(roc_auc, scored["fold"].to_numpy())(controls.fake_labels(scored), scored["score"]))


def test_the_planted_trace_is_gone_and_labels_frames_times_and_ids_stay(tables: dict[str, pl.DataFrame]) -> None:
    plain, canonical = tables["plain"], tables["canonical"]
    planted = ("key_distance_mean", "key_distance_max", "packet_bytes_mean", "bits_per_second", "size_bytes")
    for names in (planted, controls.METADATA):
        assert (auc(plain, names), auc(canonical, names)) == (1.0, 0.5)
    assert set(canonical["codec"]) == {"h264"}
    assert set(canonical["key_distance_max"]) == {None}  # sixteen frames are one group of pictures
    for name in ("video_id", "path", "label", "group_id", "content_sha256", "perceptual_hash", "width", "num_frames"):
        assert canonical[name].equals(plain[name]), name
    np.testing.assert_allclose(canonical["duration_seconds"], plain["duration_seconds"], rtol=1e-6)


def test_a_trial_has_so_many_whole_groups_of_both_labels_and_loses_nothing(tables: dict[str, pl.DataFrame]) -> None:
    assert tables["trial"]["group_id"].n_unique() == 5
    assert set(tables["trial"]["label"]) == {"real", "fake"}
    assert tables["rejected"]["reason"].to_list() == ["not_in_trial"] * 11
    labels = {f"g{n}": ["real", "fake"] if n == 7 else ["fake" if n < 4 else "real"] for n in range(30)}
    chosen = [trial_groups(labels, number, seed=1) for number in (4, 9, 99)]
    assert chosen[0] < chosen[1] < chosen[2] == set(labels)
    assert trial_groups(labels, 9, seed=2) != chosen[1]


# --- Reals have 144 x 96 pixels at 30 frames a second, fakes 96 x 64 at 20.


def drifting(number: int, size: tuple[int, int], rate: int) -> Iterator[np.ndarray]:
    """A second of a picture that drifts, drawn alike at any size and rate."""
    # Without detail that a smaller size would have lost: that would survive as sharpness, and no recipe brings it back.
    coarse = Image.fromarray(np.random.default_rng(number).integers(30, 220, (6, 9, 3), np.uint8))
    picture = np.asarray(coarse.resize((360, 192), Image.Resampling.BICUBIC))
    for step in range(rate):
        left = int(60 * step / rate)
        yield np.asarray(Image.fromarray(picture[:, left : left + 288]).resize(size, Image.Resampling.BOX))


@pytest.fixture(scope="module")
def rescaled(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("rescale")
    for number in range(8):
        label, size, rate = ("fake", (96, 64), 20) if number % 2 else ("real", (144, 96), 30)
        write_video(folder / "corpus" / label / f"{number}.mp4", drifting(number, size, rate), rate, preset="ultrafast")
    made = index_of(folder / "corpus", folder, **PLAIN, rescale=32)
    originals = read_table(folder / "original_index.parquet", INDEX)
    return SimpleNamespace(folder=folder / "corpus", originals=originals, index=made.index, notes=made.report.notes)


def store_of(cache: Path, **changes: int) -> ClipStore:
    settings = {"rescale": 32, "num_frames": 2, "fixed_size": 32, "frame_sampling": "uniform", **changes}
    return ClipStore.of(RunConfig(cache_dir=str(cache), **settings))


def test_labels_that_size_and_rate_told_are_at_chance_after_it(rescaled: SimpleNamespace) -> None:
    assert set(rescaled.index.select("height", "frames_per_second").rows()) == {(32, 8.0)}
    assert set(rescaled.originals.select("height", "frames_per_second").rows()) == {(96, 30.0), (64, 20.0)}
    same = ("video_id", "path", "label", "group_id", "content_sha256", "perceptual_hash")
    assert rescaled.index.select(same).equals(rescaled.originals.select(same))
    (note,) = rescaled.notes
    assert "32 rows" in note


def test_clips_and_judged_files_are_of_the_rescaled_videos(rescaled: SimpleNamespace, tmp_path: Path) -> None:
    store, row = store_of(rescaled.folder.parent), rescaled.index.row(0, named=True)
    assert store.decode_hash != store_of(rescaled.folder.parent, rescale=0).decode_hash
    assert make_clips(store, rescaled.index.head(1), rescaled.folder, 0, None, workers=1).failed == ()
    path = rescaled.folder / row["path"]
    wanted = decode_clip(reencoded(path, store.recipe, store.cache_dir), 2, 32).frames
    assert (store.read(row["video_id"], 0) == wanted).all()
    clip = tmp_path / "0.npy"
    assert make_original(item_to_decode(store_of(tmp_path / "cache"), FileToScore(path, (0,)), clip)) == {}
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == [clip], "a judged file fills no cache"
    assert (np.load(clip) == wanted).all()


def test_whether_a_file_is_familiar_is_asked_of_the_files_as_they_came(
    rescaled: SimpleNamespace, tmp_path: Path
) -> None:
    run = RunPaths(tmp_path)
    write_table(rescaled.index, INDEX, run.index)
    write_table(rescaled.originals, INDEX, run.original_index)
    facts = asdict(probe_video(rescaled.folder / rescaled.index["path"][0]))
    assert training_ranges(index_of_files(run)).reasons(facts) == []
    assert any("frames per second" in told for told in training_ranges(rescaled.index).reasons(facts))
    run.original_index.unlink()
    assert index_of_files(run).equals(rescaled.index)  # of a run that left its videos as they are
