"""The memory that decoding takes and keeps, and files larger than the memory of a worker."""

import json
import subprocess
import sys
import tarfile
from dataclasses import asdict
from pathlib import Path

import av
import numpy as np
import pytest

from fvc_lib.corpus.probing import VIDEO_FILES
from fvc_lib.services.isolated_workers import DEFAULT_MEMORY_BYTES, WORKER_BYTES, run_isolated
from fvc_lib.services.registry import PLAIN_VIEW
from fvc_lib.video.clips.making import DECODE_FUNCTION
from fvc_lib.video.clips.store import crop_code, decode_code
from fvc_lib.video.decode.clip import decode_clip
from fvc_lib.video.features.measuring import MEASURE_FUNCTION, code_of, families_named

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc, which only Linux has")

MEASURE = """
import gc, json, sys
from pathlib import Path
from fvc_lib.video.decode.clip import decode_clip
def mebibytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) / 1024
gc.disable()  # what only the collector would free counts as kept
paths, sizes = [Path(name) for name in sys.argv[2:]], []
for number in range(int(sys.argv[1])):
    decode_clip(paths[number % len(paths)], 8, 112)
    sizes.append(mebibytes("VmRSS"))
print(json.dumps({"sizes": sizes, "peak": mebibytes("VmHWM"), "torch": "torch" in sys.modules}))
"""


def _measure(num_decodes: int, *paths: Path) -> dict:
    command = [sys.executable, "-c", MEASURE, str(num_decodes), *map(str, paths)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_two_hundred_decodes_keep_less_than_twenty_megabytes(make_video):
    cases = {
        "a.mp4": {"options": {"bf": "3"}, "display": (-90.0, False)},
        "a.mkv": {"codec": "libvpx-vp9", "options": {"cpu-used": "8"}},
        "a.ts": {"options": {"bf": "2"}},
        "reordered.avi": {"options": {"bf": "2"}},
    }
    paths = [make_video(name, 24, width=320, height=240, **case) for name, case in cases.items()]
    sizes = _measure(200, *paths)["sizes"]
    assert sizes[-1] - sizes[3] < 20
    assert sizes[-1] - sizes[99] < 5


def test_a_decode_worker_is_small_as_a_whole_process(make_video):
    path = make_video("large.mp4", 12, width=1920, height=1080, options={"preset": "veryfast", "bf": "3"}, gop=250)
    measured = _measure(1, path)
    assert measured["peak"] < 80
    assert not measured["torch"]


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
        (answer,) = run_isolated("tests.video.workers:peak_of", [[function, item]], workers=1)
        assert answer.failure is None, answer.detail
        assert not {"video_error", "reason", "code_changed"} & answer.value["answer"].keys(), answer.value["answer"]
        assert 0.5 * WORKER_BYTES < answer.value["peak_bytes"] < 1.05 * WORKER_BYTES, function
    assert (tmp_path / "clip.npy").is_file()


HOLE = DEFAULT_MEMORY_BYTES + (1 << 20)


def _large_frames(video, tmp_path):
    """The hole is in the box ``mdat`` itself, whose header grows into the empty box that ffmpeg writes before it."""
    content, large = video.read_bytes(), tmp_path / "large.mov"
    frames, index = content.index(b"mdat") - 4, content.index(b"moov") - 4
    assert content[frames - 4 : frames] in (b"free", b"wide")
    header = (1).to_bytes(4, "big") + b"mdat" + (index - frames + 8 + HOLE).to_bytes(8, "big")
    with large.open("wb") as file:
        file.write(content[: frames - 8] + header + content[frames + 8 : index])
        file.seek(HOLE, 1)
        file.write(content[index:])
    return large


def _in_a_tar(video, tmp_path):
    tar, padding, member = tmp_path / "large.tar", tarfile.TarInfo("a.bin"), tarfile.TarInfo("real/b.mov")
    padding.size, member.size = HOLE, video.stat().st_size
    with tar.open("wb") as file:
        file.write(padding.tobuf(tarfile.GNU_FORMAT))
        file.seek(HOLE, 1)
        file.write(member.tobuf(tarfile.GNU_FORMAT) + video.read_bytes() + bytes(-member.size % 512 + 1024))
    return tar / "real/b.mov"


@pytest.mark.parametrize("make_large", [_large_frames, _in_a_tar])
def test_a_file_larger_than_the_memory_gives_the_frames_of_the_small_one(make_video, tmp_path, make_large):
    small = make_video("small.mov", 9)
    large = make_large(small, tmp_path)
    target = tmp_path / "clip"
    item = {
        "source": str(large), "target": str(target), "content_sha256": "", "num_frames": 6, "fixed_size": 32,
        "view": asdict(PLAIN_VIEW), "code": decode_code(PLAIN_VIEW), "crop": crop_code(PLAIN_VIEW), "recipe": "",
        "encoded": [], "seen": "",
    }  # fmt: skip
    (answer,) = run_isolated(DECODE_FUNCTION, [item], workers=1)
    assert (answer.failure, answer.value) == (None, {})
    assert decode_clip(small, 6, 32).frames.tobytes() in target.read_bytes()
