"""Where size and rate are all that differs between the labels, nothing tells them once videos are rescaled."""

from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import polars as pl
import pytest
from PIL import Image

from fvc_lib.corpus.index import rescaling_note
from fvc_lib.services.config import RunConfig
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import INDEX, read_table, write_table
from fvc_lib.tasks.decoding import FileToScore, item_to_decode
from fvc_lib.tasks.video.predicting import index_of_files
from fvc_lib.tasks.video.verdicts.unfamiliar import training_ranges
from fvc_lib.video.clips.making import make_clips
from fvc_lib.video.clips.store import ClipStore
from fvc_lib.video.clips.worker import make_original
from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.decode.probe import probe_video
from fvc_lib.video.reencode import reencoded
from tests.corpus.indexing import index_of

NUM_VIDEOS, SECONDS = 8, 1
RESCALED = RunConfig(rescale=32, bootstrap_replicates=200)


def write_video(path: Path, number: int, size: tuple[int, int], rate: int) -> None:
    """A second of a picture that drifts, drawn alike at any size and rate; no bit is lost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(number)
    # Without detail that a smaller size would have lost: that would survive as sharpness, and no recipe brings it back.
    coarse = Image.fromarray(random.integers(30, 220, (6, 9, 3), np.uint8))
    picture = np.asarray(coarse.resize((360, 192), Image.Resampling.BICUBIC))
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.options = {"qp": "0", "preset": "ultrafast"}
        for step in range(SECONDS * rate):
            left = int(60 * step / rate)
            shown = Image.fromarray(picture[:, left : left + 288]).resize(size, Image.Resampling.BOX)
            frame = av.VideoFrame.from_image(shown)
            frame.pts, frame.time_base = step, Fraction(1, rate)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


@dataclass(frozen=True)
class Corpus:
    folder: Path
    originals: pl.DataFrame
    index: pl.DataFrame
    notes: tuple[str, ...]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Reals of 144 x 96 pixels at 30 frames a second, fakes of 96 x 64 at 20, otherwise alike."""
    folder = tmp_path_factory.mktemp("rescale")
    for number in range(NUM_VIDEOS):
        label, size, rate = ("fake", (96, 64), 20) if number % 2 else ("real", (144, 96), 30)
        write_video(folder / "corpus" / label / f"{number}.mp4", number, size, rate)
    made = index_of(folder / "corpus", folder, near_duplicate_bits=0, max_rejected_share=0, workers=2, rescale=32)
    originals = read_table(folder / "original_index.parquet", INDEX)
    return Corpus(folder / "corpus", originals, made.index, made.report.notes)


def test_labels_that_size_and_rate_told_are_at_chance_after_it(corpus: Corpus) -> None:
    assert set(corpus.index.select("height", "frames_per_second").rows()) == {(32, 8.0)}
    assert set(corpus.originals.select("height", "frames_per_second").rows()) == {(96, 30.0), (64, 20.0)}
    same = ("video_id", "path", "label", "group_id", "content_sha256", "perceptual_hash")
    assert corpus.index.select(same).equals(corpus.originals.select(same))


def test_clips_are_of_the_rescaled_videos(corpus: Corpus) -> None:
    config = RunConfig(rescale=32, cache_dir=str(corpus.folder.parent), num_frames=2,
                       fixed_size=32, frame_sampling="uniform")  # fmt: skip
    store, plain = ClipStore.of(config), ClipStore.of(config.model_copy(update={"rescale": 0}))
    assert store.decode_hash != plain.decode_hash
    index = corpus.index.head(1)
    assert make_clips(store, index, corpus.folder, 0, None, workers=1).failed == ()
    kept = reencoded(corpus.folder / index["path"][0], config.recipe, config.cache_dir)
    assert (store.read(index["video_id"][0], 0) == decode_clip(kept, 2, 32).frames).all()


def test_a_file_to_be_judged_is_rescaled_too_and_fills_no_cache(corpus: Corpus, tmp_path: Path) -> None:
    store = ClipStore.of(RunConfig(rescale=32, cache_dir=str(tmp_path / "cache"), num_frames=2,
                                   fixed_size=32, frame_sampling="uniform"))  # fmt: skip
    path, clip = corpus.folder / corpus.index["path"][0], tmp_path / "clips" / "0.npy"
    clip.parent.mkdir()
    item = item_to_decode(store, FileToScore(path, (0,)), clip)
    assert make_original(item) == {}
    assert [each.name for each in tmp_path.rglob("*") if each.is_file()] == [clip.name]
    judged_clip = np.load(clip)
    kept = reencoded(path, store.recipe, store.cache_dir)
    assert (judged_clip == decode_clip(kept, 2, 32).frames).all()


def test_whether_a_file_is_familiar_is_asked_of_the_files_as_they_came(corpus: Corpus, tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    write_table(corpus.index, INDEX, run.index)
    write_table(corpus.originals, INDEX, run.original_index)
    facts = asdict(probe_video(corpus.folder / corpus.index["path"][0]))
    assert training_ranges(index_of_files(run)).reasons(facts) == []
    assert any("frames per second" in told for told in training_ranges(corpus.index).reasons(facts))
    run.original_index.unlink()
    assert index_of_files(run).equals(corpus.index)  # of a run that left its videos as they are


def test_notes_count_what_was_enlarged_or_repeated(corpus: Corpus) -> None:
    (note,) = corpus.notes
    assert all(words in note for words in ("32 rows and 8 frames", "Of 8 videos 0 were enlarged", " 0 repeat frames"))
    note = rescaling_note(corpus.originals, "rescale_80_at_25")
    assert all(words in note for words in ("4 were enlarged", "smallest has 64 rows", " 4 repeat frames"))
    film = corpus.originals.with_columns(frames_per_second=pl.lit(23.976), rotation_degrees=pl.lit(90, pl.Int64))
    assert " 0 repeat frames" in rescaling_note(film, "rescale_96_at_24")
    assert rescaling_note(corpus.originals, "canonical") == ""
