"""A planted trace of the container is gone after the canonical re-encode, and nothing else is."""

from pathlib import Path
from typing import Any

import av
import numpy as np
import polars as pl
import pytest

from fvc_lib.corpus.index import trial_groups
from fvc_lib.metrics.classification import roc_auc
from fvc_lib.metrics.cross_validation import within_folds
from fvc_lib.tasks.video import controls
from tests.corpus.indexing import index_of

COUNT = 16


def write_video(path: Path, number: int, *, is_fake: bool) -> None:
    """Sixteen frames, no bit of them lost, the same in a real and a fake; fakes have closer keyframes, no B-frames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(number // 2)
    picture = np.kron(random.integers(30, 220, (9, 9, 3)), np.ones((16, 16, 1))).astype(np.uint8)
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        stream.codec_context.options = {"qp": "0", "g": "2", "bf": "0"} if is_fake else {"qp": "0", "g": "8", "bf": "2"}
        for step in range(COUNT):
            frame = np.ascontiguousarray(picture[step : step + 64, 2 * step : 2 * step + 96])
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode(None))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pl.DataFrame]:
    folder = tmp_path_factory.mktemp("canonical")
    for number in range(16):
        label = "fake" if number % 2 else "real"
        write_video(folder / "corpus" / label / f"{number}.mp4", number, is_fake=bool(number % 2))
    indexes: dict[str, dict[str, Any]] = {
        "plain": {},
        "canonical": {"canonical": True},
        "trial": {"dev_groups": 5, "seed": 3},
    }
    plain = {"near_duplicate_bits": 0, "max_rejected_share": 0, "workers": 2}
    made = {name: index_of(folder / "corpus", folder / "out", **plain, **options) for name, options in indexes.items()}
    return {name: each.index for name, each in made.items()} | {"rejected": made["trial"].rejected}


def auc(index: pl.DataFrame, names: tuple[str, ...]) -> float:
    number = pl.col("path").str.extract(r"(\d+)").cast(pl.Int64)
    folds = index.select("video_id", "group_id", "label", fold=number // 2 % 4)
    scored = controls.metadata_only(index, folds, names)
    return float(within_folds(roc_auc, scored["fold"].to_numpy())(controls.fake_labels(scored), scored["score"]))


def test_the_planted_trace_is_gone_and_labels_frames_times_and_ids_stay(tables: dict[str, pl.DataFrame]) -> None:
    plain, canonical = tables["plain"], tables["canonical"]
    planted = ("key_distance_mean", "key_distance_max", "packet_bytes_mean", "bits_per_second", "size_bytes")
    every = controls.METADATA
    assert auc(plain, every) == auc(plain, planted) == 1.0
    assert auc(canonical, planted) == auc(canonical, every) == 0.5
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
