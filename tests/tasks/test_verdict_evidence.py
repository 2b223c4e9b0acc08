"""A video's own page: the score over time, and the message where a part fails."""

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fvc_lib.analysis.pages.answers import over_time
from fvc_lib.command_line.main import main
from fvc_lib.command_line.models import verdict_detector
from fvc_lib.command_line.verdicts.pages import page_name, page_parts, write_video_pages
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import INDEX, read_table
from fvc_lib.tasks.video.predicting import VideoDetector
from fvc_lib.tasks.video.verdicts import evidence, judging
from fvc_lib.tasks.video.verdicts.evidence import decoded, score_windows
from fvc_lib.tasks.video.verdicts.rule import rule_of
from fvc_lib.tasks.video.verdicts.unfamiliar import distance_of
from tests.kits.scored_run import NUM_VIDEOS, copied_run, write_video
from tests.kits.training import draw_clip

pytestmark = pytest.mark.usefixtures("warm_workers")

HOSTILE = "<img src=x onerror=alert(1)>&.mp4"


@pytest.fixture(scope="module")
def run(scored_run) -> RunPaths:
    return scored_run


@pytest.fixture(scope="module")
def detector(run) -> VideoDetector:
    return verdict_detector(run.root)


def write_changed(path: Path, begin: int, end: int, num_frames: int = 48) -> None:
    """A video with the look of a fake from frame ``begin`` to ``end``, half-open, and else of a real."""
    real, fake = (draw_clip(f"{path.stem} {label}", 0, label == "fake") for label in ("real", "fake"))
    shown = [(fake if begin <= number < end else real)[number % 4] for number in range(num_frames)]
    write_video(path, np.stack(shown))


def test_the_curve_is_higher_where_a_video_was_changed(detector, tmp_path):
    begin, end = 30, 48
    write_changed(tmp_path / "changed.mp4", begin, end)
    with decoded(detector.networks, tmp_path / "changed.mp4", "") as (windows, frames, _):
        found = score_windows(detector.networks, tuple(detector.networks.folds), windows, frames, {})
    first, last = begin / 25, end / 25
    inside = (found.begins >= first) & (found.ends <= last + 1e-9)
    outside = (found.ends <= first) | (found.begins >= last)
    mean = found.scores.mean(1)
    assert mean[inside].min() > mean[outside].max() + 0.1
    most = over_time(found.begins, found.ends, found.scores, found.middles, 4.0)["most"]
    assert first <= (most["begin"] + most["end"]) / 2 <= last
    assert found.scores.shape == (7, 2)
    assert "together they show 33 %" in found.note


def test_a_short_video_has_no_curve(detector, tmp_path):
    write_video(tmp_path / "short.mp4", draw_clip("short", 0, True))
    with decoded(detector.networks, tmp_path / "short.mp4", "") as (windows, frames, _):
        found = score_windows(detector.networks, (0,), windows, frames, {})
    assert page_parts(evidence.FileEvidence(windows=found))["over_time"] is None
    assert found.note == "No score over time: the video's 4 frames give one window."


def test_a_video_with_nothing_to_judge_gets_no_answer_and_says_why(detector, tmp_path):
    clip = draw_clip("other", 0, True)
    shown = {
        "black.mp4": (np.zeros((30, *clip.shape[1:]), np.uint8), "All frames that the networks see are black"),
        "still.mp4": (np.repeat(clip[:1], 30, axis=0), "A still: nothing moves"),
        "short.mp4": (clip[:3], "It has 3 frames and the networks look at 4"),
    }
    for name, (frames, _) in shown.items():
        write_video(tmp_path / name, frames)
    day = np.concatenate([clip] * 12)
    write_video(tmp_path / "moving.mp4", np.concatenate([day[:20], day[20:] // 4]))
    files = [tmp_path / name for name in (*shown, "moving.mp4")]
    verdicts = judging.judge_files(detector, files, rule_of(0.3), tmp_path / "out", workers=1)
    *rows, moving = verdicts.rows()
    for row, (_, reason) in zip(rows, shown.values(), strict=True):
        assert row["score"] is not None
        assert row["verdict"] == "undecided"
        assert reason in row["reasons"]
    assert not any(reason in moving["reasons"] for _, reason in shown.values())


@pytest.mark.slow
def test_a_page_for_each_judged_file_whole_harmless_and_not_made_twice(run, detector, tmp_path, monkeypatch):
    for name in (HOSTILE, "gone.mp4"):
        write_changed(tmp_path / name, 10, 40)
    own = read_table(run.index, INDEX).row(0, named=True)
    corpus = run.root.parents[2] / "corpus"
    files = [tmp_path / HOSTILE, tmp_path / "gone.mp4", corpus / own["path"], tmp_path / "never.mp4"]
    out = tmp_path / "out"
    verdicts = judging.judge_files(detector, files, rule_of(0.3), out, workers=1)
    (tmp_path / "gone.mp4").rename(tmp_path / "away.mp4")
    seen = []
    real = evidence.score_windows
    monkeypatch.setattr(evidence, "score_windows", lambda n, folds, *of: seen.append(folds) or real(n, folds, *of))

    pages = write_video_pages(verdicts, out, map_minutes=0)
    names = [page_name(number, str(path)) for number, path in enumerate(files, 1)]
    assert list(pages.values()) == [f"videos/{name}" for name in names[:3]]
    assert names[0] == "0001_img-src-x-onerror-alert-1.html"
    hostile, gone, known = ((out / page).read_text() for page in pages.values())
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;.mp4" in hostile
    assert "default-src &#39;none&#39;" in hostile
    assert not re.search("<script|<img src=x", hostile)
    assert not re.search(r"(src|href)=\"(?!data:|#|\.\./verdicts\.html)", hostile.partition("<body>")[2])
    assert len(hostile) < 1_000_000
    assert '<svg class="curve"' in hostile
    assert "manifest (C2PA)" in hostile
    assert "DataError: " in gone
    assert "no such file" in gone
    assert f"This is a video of the run, {own['video_id']}" in known
    fold = detector.known.rows.filter(video_id=own["video_id"])["fold"][0]
    assert seen == [(0, 1), (fold,)]

    (tmp_path / "away.mp4").rename(tmp_path / "gone.mp4")  # what failed may have passed
    stamps = {page: (out / page).stat().st_mtime_ns for page in pages.values()}
    for _ in range(2):
        write_video_pages(verdicts, out, map_minutes=0)
    assert [page for page in stamps if stamps[page] != (out / page).stat().st_mtime_ns] == [f"videos/{names[1]}"]
    assert '<svg class="curve"' in (out / "videos" / names[1]).read_text()
    assert len(seen) == 3
    write_video_pages(verdicts, out, map_minutes=0, most=1)
    assert [path.name for path in (out / "videos").iterdir()] == names[:1]


def test_stored_features_are_of_the_pass_that_scores_and_are_refused_for_other_networks(run, detector, tmp_path):
    known, networks = detector.known, detector.networks
    found = distance_of(networks, known)
    assert found.num_groups == NUM_VIDEOS
    own = known.tested.filter(fold=0).sort("video_id")
    clip = np.array(networks.store.read(own["video_id"][1], 0))[None, None]
    features: dict[int, list[np.ndarray]] = {}
    assert networks.logits((0,), clip, features).tolist() == networks.logits((0,), clip).tolist()
    assert features[0][0].tolist() == found.features[0][1:2].tolist()
    assert detector.distance.digest == found.digest
    copy = copied_run(run, tmp_path)
    of_others = copy.test_features.read_bytes().replace(b"weights", b"another")
    for content in (of_others, None):
        copy.test_features.unlink() if content is None else copy.test_features.write_bytes(content)
        with pytest.raises(DataError, match=f"--only 05 --resume {copy.root}"):
            verdict_detector(copy.root).distance.digest  # noqa: B018 - is read when it is first needed


def test_predict_answers_first_without_a_notebook_and_its_page_leads_to_the_evidence(run, tmp_path):
    new, broken, out = tmp_path / "new.mp4", tmp_path / "broken.mp4", tmp_path / "out"
    write_changed(new, 10, 40)
    broken.write_bytes(b"no video")
    asked = ["predict", str(run.root), str(new), str(broken), "--out", str(out), "--map-minutes", "0", "-j", "1"]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    first, second, *_ = done.output.splitlines()
    assert first.startswith(f"{new}: undecided, probability of fake 0.")
    assert second.startswith(f"{broken}: not read. ")
    assert not list(out.rglob("*.ipynb"))
    assert 'href="videos/0001_new.html"' in (out / "verdicts.html").read_text()
    assert "manifest (C2PA)" in (out / "videos" / "0001_new.html").read_text()
    alone = CliRunner().invoke(main, ["predict", str(run.root), str(broken), "--out", str(tmp_path / "alone")])
    assert (alone.exit_code, alone.stdout, f"error: {broken}: " in alone.stderr) == (3, "", True)
