import csv
from pathlib import Path

import pytest

from fvc_lib.video.decode.clip import decode_clip, probe_video
from fvc_lib.video.decode.source import VideoError


def test_a_plain_video_is_described_whether_its_path_is_text_or_not(make_video):
    path = make_video("a.mp4", 20, options={"bf": "2"})
    probe = probe_video(path)
    assert probe == probe_video(str(path))
    assert (decode_clip(str(path), 3).frames == decode_clip(path, 3).frames).all()
    assert (probe.codec, probe.container, probe.pixel_format) == ("h264", "mov", "yuv420p")
    assert (probe.width, probe.height, probe.num_frames) == (64, 48, 20)
    assert probe.frames_per_second == pytest.approx(25)
    assert probe.duration_seconds == pytest.approx(0.8)
    assert not probe.has_audio
    assert probe.size_bytes == path.stat().st_size
    assert probe.bits_per_second == pytest.approx(8 * path.stat().st_size / 0.8)


@pytest.mark.parametrize(("degrees", "expected"), [(0, 0), (-90, 90), (180, 180), (90, 270)])
def test_rotation_is_clockwise_and_the_size_stays_as_stored(make_video, degrees, expected):
    probe = probe_video(make_video("turned.mp4", 2, display=(degrees, False)))
    assert probe.rotation_degrees == expected
    assert (probe.width, probe.height) == (64, 48)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("raw.h264", {"container": "h264", "options": {"bf": "2"}}),
        ("b.avi", {"options": {"bf": "2"}}),
        ("variable.mkv", {"times_ms": [n * n for n in range(20)]}),
        ("alt_ref.webm", {"codec": "libvpx-vp9", "options": {"lag-in-frames": "16", "cpu-used": "8"}}),
    ],
)
def test_frames_are_counted_where_headers_do_not_tell(make_video, name, options):
    assert probe_video(make_video(name, 20, **options)).num_frames == 20


def test_a_single_frame_has_a_rate_and_a_duration_or_none(make_video):
    probe = probe_video(make_video("one.mp4", 1))
    assert probe.num_frames == 1
    assert probe.duration_seconds is None or probe.duration_seconds > 0


def test_real_files_are_counted_as_a_full_decode_counts_them(shared_media):
    with (shared_media / "manifest.csv").open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["path"].startswith("decode/")]
    rotations = {"-90": 90, "90": 270, "-180": 180, "0": 0}
    wrong = []
    for row in rows:
        probe = probe_video(shared_media / row["path"])
        if row["n_frames"].isdigit() and probe.num_frames != int(row["n_frames"]):
            wrong.append((row["path"], probe.num_frames, row["n_frames"]))
        if row["codec"] and probe.codec != row["codec"]:
            wrong.append((row["path"], probe.codec, row["codec"]))
        if row["rotation"] in rotations and probe.rotation_degrees != rotations[row["rotation"]]:
            wrong.append((row["path"], probe.rotation_degrees, row["rotation"]))
        if row["width"] and (probe.width, probe.height) != (int(row["width"]), int(row["height"])):
            wrong.append((row["path"], probe.width, probe.height))
    assert wrong == []


def test_broken_files_give_a_documented_error_or_frames(shared_media: Path, capfd):
    reasons = set()
    for path in sorted((shared_media / "broken").iterdir()):
        try:
            assert probe_video(path).num_frames > 0
        except VideoError as error:
            reasons.add(error.reason)
    assert reasons >= {"unreadable", "no_video", "corrupt"}
    assert reasons <= {"unreadable", "no_video", "truncated", "corrupt", "refused", "unsupported"}
    assert capfd.readouterr().err == ""
