"""What decoding takes and keeps, in processes of their own: the figures that a node full of workers is planned by."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
