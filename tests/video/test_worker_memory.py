"""What a pool reckons with for each worker is what a worker takes: of 1080p videos, whose decoders hold most."""

import sys
from dataclasses import asdict

import av
import numpy as np
import pytest

from fvc_lib.corpus.probing import VIDEO_FILES
from fvc_lib.services.isolated_workers import WORKER_BYTES, run_isolated
from fvc_lib.services.registry import PLAIN_VIEW
from fvc_lib.video.clips.making import DECODE_FUNCTION
from fvc_lib.video.clips.store import crop_code, decode_code
from fvc_lib.video.features.measuring import MEASURE_FUNCTION, code_of, families_named

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measured on Linux")
ENCODERS = {
    "libx264": {"preset": "superfast", "refs": "4"},
    "libx265": {"preset": "superfast", "x265-params": "log-level=none:pools=1:ref=4:bframes=4"},
    "libsvtav1": {"preset": "12"},
}


@pytest.fixture(scope="module", params=ENCODERS)
def full_hd(request, tmp_path_factory):
    if request.param not in av.codecs_available:
        pytest.skip(f"PyAV has no {request.param}")
    path = tmp_path_factory.mktemp("full_hd") / f"{request.param}.mp4"
    blocks = np.random.default_rng(0).integers(0, 255, (68, 120, 3), np.uint8).repeat(16, 0).repeat(16, 1)[:1080]
    with av.open(path, "w") as container:
        stream = container.add_stream(request.param, rate=25, options=ENCODERS[request.param])
        stream.width, stream.height, stream.pix_fmt = 1920, 1080, "yuv420p"
        for number in range(24):
            moved = np.roll(blocks, (3 * number, 5 * number), (0, 1))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(moved, "rgb24")))
        container.mux(stream.encode())
    return path


@pytest.mark.slow
def test_workers_take_of_full_hd_videos_what_pools_reckon_with(full_hd, tmp_path):
    clip = {
        "source": str(full_hd), "target": str(tmp_path / "clip.npy"), "content_sha256": "", "num_frames": 6,
        "fixed_size": 224, "view": asdict(PLAIN_VIEW), "code": decode_code(PLAIN_VIEW), "crop": crop_code(PLAIN_VIEW),
        "recipe": "", "encoded": [], "seen": "",
    }  # fmt: skip
    families = {family.name: code_of(family) for family in families_named("all")}
    features = {"source": str(full_hd), "content_sha256": "", "families": families, "encoded": []}
    work = [(DECODE_FUNCTION, clip), (VIDEO_FILES.function, str(full_hd)), (MEASURE_FUNCTION, features)]
    for function, item in work:
        (answer,) = run_isolated("tests.video.peak_worker:peak_of", [[function, item]], workers=1)
        assert answer.failure is None, answer.detail
        assert not {"video_error", "reason", "code_changed"} & answer.value["answer"].keys(), answer.value["answer"]
        assert 0.5 * WORKER_BYTES < answer.value["peak_bytes"] < 1.05 * WORKER_BYTES, function
    assert (tmp_path / "clip.npy").is_file()
