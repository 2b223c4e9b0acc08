"""Is this video fake? What is answered, what is withheld, and why."""

import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from fvc_lib.command_line.models import verdict_detector
from fvc_lib.metrics.abstention import p_values
from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import INDEX, PREDICTIONS, VERDICTS, read_table
from fvc_lib.tasks.video.calibration import read_selection
from fvc_lib.tasks.video.predicting import VideoDetector, decoding_cautions, networks_of_run
from fvc_lib.tasks.video.verdicts.judging import Verdicts, files_of, judge_files, judged
from fvc_lib.tasks.video.verdicts.rule import (
    UNCALIBRATED,
    WITHHELD,
    KnownVideos,
    Rule,
    at_prior,
    rule_of,
    rule_sentences,
)
from fvc_lib.tasks.video.verdicts.unfamiliar import copies, training_ranges
from tests.kits.scored_run import write_video
from tests.kits.training import ScoredTables, draw_clip

pytestmark = pytest.mark.usefixtures("warm_workers")


@pytest.fixture(scope="module")
def run(scored_run) -> RunPaths:
    return scored_run


@pytest.fixture
def known() -> KnownVideos:
    """40 videos in 40 groups and four folds; each fake above each real."""
    folds = ScoredTables.folds(num_groups=40, per_group=1)
    fakes = (folds["label"] == "fake").to_numpy()
    scores = np.where(fakes, 0.8, 0.1) + np.linspace(0, 0.1, 40)
    said = ScoredTables.predictions(folds, scores).select("video_id", "fold", "score", "logit", "temperature")
    rows = ScoredTables.index(folds).join(said, on="video_id", how="left", maintain_order="left")
    return KnownVideos(rows, [0.5] * 4)


def row_of(logits: np.ndarray, known: KnownVideos, rule: Rule, unfamiliar=()) -> dict[str, object]:
    """Of one new video."""
    (answer,) = known.answers_to(p_values(known.witnesses, logits[None]), rule)
    given, reasons = judged(logits, answer, known, rule, unfamiliar)
    return given | {"reasons": reasons}


def judge(run: RunPaths, files: list[Path], folder: Path, **more: object) -> Verdicts:
    return judge_files(verdict_detector(run.root), files, rule_of(0.3), folder, workers=1, **more)


def logits(score: float) -> np.ndarray:
    return np.full(4, np.log(score / (1 - score)))


def test_fake_and_real_are_said_where_the_other_is_unlikely_and_else_undecided(known):
    for score, verdict in ((0.95, "fake"), (0.05, "real"), (0.5, "undecided")):
        row = row_of(logits(score), known, rule_of(0.1))
        assert (row["verdict"], row["probability"]) == (verdict, None)
        assert row["score"] == pytest.approx(score)
    # The range of one network would look like certainty.
    one = row_of(logits(0.95)[:1], KnownVideos(known.rows.with_columns(fold=0), [0.5]), rule_of(0.1))
    assert one["verdict"] == "fake"
    assert "score_low" not in one
    odd = row_of(logits(0.95), known, rule_of(0.1), ["Unfamiliar: codec av1."])
    assert (odd["verdict"], odd["reasons"]) == ("undecided", ["Unfamiliar: codec av1."])
    withheld = row_of(logits(0.95), known, rule_of(0.1, withheld=True))
    assert (withheld["verdict"], withheld["reasons"]) == ("undecided", [WITHHELD])


def test_few_groups_cannot_show_a_low_rate_and_that_is_said(known):
    rule = rule_of(0.1, 0.01)
    assert (rule.called_fake, rule.called_real) == (0.01, 0.1)
    assert row_of(logits(0.99), known, rule)["verdict"] == "undecided"
    told = " ".join(rule_sentences(known, rule))
    assert "Nothing is called fake: " in told
    assert "20 groups show no rate below 4.76 %." in told
    assert "called real:" not in told
    assert known.rates(rule).called_fake == 0


def test_probability_is_that_of_bayes_whatever_share_training_saw_and_the_test_had():
    """A video's brightness is normal, with mean 0 of reals and 2 of fakes: its log likelihood ratio is 2 x - 2."""
    x, prior, shares = 1.7, 0.01, (0.8, 0.3)
    likelihood = np.exp(-((x - np.array([2.0, 0.0])) ** 2) / 2)
    by_hand = prior * likelihood[0] / (prior * likelihood[0] + (1 - prior) * likelihood[1])
    # A network that balanced classes taught, brought to the share of its training (``data.prior_logit``); and one that
    # learned that share itself: the same numbers.
    logits = np.array([(2 * x - 2) + np.log(share / (1 - share)) for share in shares])
    assert at_prior(logits, shares, prior) == pytest.approx(by_hand, rel=1e-12)
    assert at_prior(logits, shares, None) is None
    assert at_prior(logits, (0.8, None), prior) is None


def test_scores_are_probabilities_at_the_share_of_the_videos_they_were_calibrated_on(run):
    detector = verdict_detector(run.root)
    for fold, rate in enumerate(detector.known.base_rates):
        chosen = read_selection(run.fold_checkpoints(fold)).selection
        assert rate == chosen.num_fake / (chosen.num_fake + chosen.num_real)
    told = list(rule_sentences(detector.known, rule_of(0.3, prior=0.01)))
    assert "calibrated where this share of the videos are: 50 %." in told[-1]
    of_few_groups = KnownVideos(detector.known.rows, [None, 0.5])
    assert [UNCALIBRATED in some for some in (told, rule_sentences(of_few_groups, rule_of(0.3)))] == [False, True]


@pytest.mark.parametrize(("rate", "fpr", "prior"), [(0, 0, 0), (1.5, 0, 0), (0.1, 2, 0), (0.1, 0, -1)])
def test_rates_outside_of_0_and_1_are_refused(rate, fpr, prior):
    with pytest.raises(UsageError, match="wanted"):
        rule_of(rate, fpr, prior)


def test_what_lies_beyond_the_runs_videos_is_named_and_what_lies_within_is_not():
    folds = ScoredTables.folds()
    count = folds.height
    index = ScoredTables.index(
        folds, duration_seconds=list(np.linspace(2, 10, count)), frames_per_second=[25.0] * count,
        bits_per_second=[1e6] * count,
    )  # fmt: skip
    familiar = training_ranges(index)
    assert familiar.share_unfamiliar == 0
    fine = {"codec": "h264", "width": 48, "height": 64, "duration_seconds": 10.5, "frames_per_second": 23.976,
            "bits_per_second": 1e6}  # fmt: skip
    assert familiar.reasons(fine) == []
    odd = {**fine, "codec": "av1", "width": 640, "duration_seconds": 60.0, "bits_per_second": None}
    (told,) = familiar.reasons(odd)
    for outside in ("codec av1", "shorter side in pixels 64", "longer side in pixels 640", "length in seconds 60"):
        assert outside in told
    assert "bits per second" not in told
    assert training_ranges(ScoredTables.index(folds)).reasons(fine) == []  # their lengths are not known


def test_files_are_found_in_folders_tables_and_lists_each_once(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    for name in ("b.MP4", "a.webm", "notes.txt"):
        (tmp_path / "in" / name).touch()
    (tmp_path / "list.csv").write_text('path,label\nin/a.webm,fake\n"in/=x, ""y"".mp4",real\n')
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"in/\xff.mp4\n\nin/b.MP4\n")))
    monkeypatch.chdir(tmp_path)
    found = [str(path.relative_to(tmp_path)) for path in files_of(["in", "list.csv", "-", "gone.mp4"])]
    assert found == ["in/a.webm", "in/b.MP4", 'in/=x, "y".mp4', "in/\udcff.mp4", "gone.mp4"]
    (tmp_path / "cases.csv").write_text("path,case\nin/b.MP4,event\nin/a.webm,\n")
    assert list(files_of(["cases.csv", "in"], folder_is_case=True).values()) == ["event", ""]
    assert set(files_of(["in"], folder_is_case=True).values()) == {"in"}
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="without a file of kind video"):
        files_of(["none"])
    (tmp_path / "other.csv").write_text("file,label\na.mp4,fake\n")
    for wrong, words in (
        ("other.csv", "wanted a column 'path', found 'file'"),
        ("https://a.b/c.mp4", "Fetch the video"),
    ):
        with pytest.raises(UsageError, match=words):
            files_of([wrong])


def test_a_copy_is_found_by_the_runs_videos_alone_and_by_all_of_them(run):
    hashes = read_table(run.index, INDEX)["perceptual_hash"].to_list()
    assert [copies(hashes[1:], each, 10) for each in (hashes[0], hashes[3], None)] == [[], [2], []]
    assert copies([*hashes[:2], None, hashes[3], hashes[3]], hashes[3], 10) == [3, 4]
    assert copies(hashes, hashes[0], 0) == []


def test_each_kind_of_file_gets_its_row(run, tmp_path):
    index = read_table(run.index, INDEX).sort("video_id")
    corpus = run.root.parents[2] / "corpus"
    own, shown = index.row(0, named=True), index.row(3, named=True)
    write_video(tmp_path / "new.mp4", draw_clip("new", 0, True))
    brighter = draw_clip(shown["video_id"], 0, shown["label"] == "fake").astype(int) + 2
    write_video(tmp_path / "near.mp4", np.clip(brighter, 0, 255).astype(np.uint8))
    (tmp_path / "bad.mp4").write_bytes(b"no video at all")
    files = [corpus / own["path"], *(tmp_path / name for name in ("new.mp4", "near.mp4", "bad.mp4", "gone.mp4"))]
    found = judge(run, files, tmp_path / "work")
    mine, new, copy, bad, gone = found.table.to_dicts()
    stored = pl.concat([read_table(run.predictions(fold), PREDICTIONS) for fold in range(2)])
    assert mine["score"] == stored.row(by_predicate=pl.col("video_id") == own["video_id"], named=True)["score"]
    assert (mine["score_low"], mine["video_id"]) == (None, own["video_id"])
    assert f"a video of the run, {own['video_id']}, labelled {own['label']}" in mine["reasons"]
    assert new["score_low"] <= new["score"] <= new["score_high"]
    assert new["verdict"] in ("fake", "real", "undecided")
    assert (copy["score"], copy["verdict"], copy["failure"]) == (None, None, None)
    assert f"near-duplicate of a video of the run: {shown['video_id']}, labelled {shown['label']}." in copy["reasons"]
    assert "unreadable" in bad["failure"]
    assert "no such file" in gone["failure"]
    assert bad["verdict"] is gone["verdict"] is None
    assert found.answer().endswith("1 without a prediction, 2 could not be read.")
    assert found.limits[0].startswith("Asked: at most 30 % of the reals called fake")


@pytest.mark.parametrize("how", ["mean", "max"])
def test_videos_of_a_case_get_a_verdict_together_next_to_their_own(run, tmp_path, monkeypatch, how):
    index = read_table(run.index, INDEX).sort("video_id")
    own = run.root.parents[2] / "corpus" / index["path"][0]
    for name, is_fake in (("a", True), ("b", True), ("c", False)):
        write_video(tmp_path / f"{name}.mp4", draw_clip(name, 0, is_fake))
    detector = verdict_detector(run.root)
    detector.config = detector.config.model_copy(update={"case_score": how})
    names = {"a": "event", "b": "event", "gone": "event", "c": ""}
    files = {tmp_path / f"{name}.mp4": case for name, case in names.items()} | {
        own: "known",
        tmp_path / "x.mp4": "lost",
    }
    found = judge_files(detector, files, rule_of(0.3), tmp_path / "out", workers=1)
    event, known, lost = found.cases.to_dicts()
    a, b, _, _, stored, _ = found.table.to_dicts()
    assert (event["case"], event["videos"], event["scored"]) == ("event", 3, 2)
    assert (event["score"] >= max(a["score"], b["score"])) is (how == "max")
    assert min(a["score"], b["score"]) <= event["score"]
    assert known["score"] == pytest.approx(stored["score"], abs=1e-9)
    assert (lost["score"], lost["verdict"]) == (None, None)
    assert f"Case 'event', 2 of 3 videos scored: {event['verdict']}" in found.limits[0]
    assert pl.read_csv(tmp_path / "out/cases.csv")["case"].to_list() == ["event", "known", "lost"]


def test_a_stopped_call_goes_on_and_scores_only_what_is_new_or_has_changed(run, tmp_path, monkeypatch):
    files = [tmp_path / f"{name}.mp4" for name in "abc"]
    for file in files:
        write_video(file, draw_clip(file.stem, 0, file.stem == "b"))
    (tmp_path / "bad.mp4").write_bytes(b"\0" * 5000)
    asked, folder, detector = [*files, tmp_path / "bad.mp4"], tmp_path / "out", verdict_detector(run.root)
    fresh, same = judge(run, asked, tmp_path / "fresh").table, ["path", "sha256", "verdict", "reasons", "failure"]
    looked, findings = list[str](), VideoDetector.findings

    def watched(self, files, **more):
        looked.extend(path.stem for path in files)
        return findings(self, files, **more)

    monkeypatch.setattr(VideoDetector, "findings", watched)

    def go_on(rule=None, progress=lambda done, total: None) -> Verdicts:
        looked.clear()
        return judge_files(detector, asked, rule or rule_of(0.3), folder, workers=1, progress=progress)

    def stop(done, _):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go_on(progress=stop)
    assert not (folder / "verdicts.csv").exists()
    journal = folder / "findings.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"by": "somebody", "path": ')  # as a crash of the machine leaves it
    whole = go_on()
    assert len(looked) == 2  # the fourth, and a failure that may pass
    assert whole.table.select(same).equals(fresh.select(same))
    assert whole.table["score"][:3].to_list() == pytest.approx(fresh["score"][:3].to_list(), abs=1e-6)
    assert read_table(folder / "verdicts.csv", VERDICTS)["score"].equals(whole.table["score"])

    again = go_on(rule=rule_of(0.1, prior=0.01))
    assert looked == ["bad"]
    assert again.table["score"].equals(whole.table["score"])
    assert again.table["probability"].null_count() == 1

    os.utime(files[0])  # looked at again, and found to be the same
    write_video(files[1], draw_clip("other", 0, False))
    changed = go_on()
    assert looked == ["b", "bad"]
    assert changed.table["sha256"].to_list()[::2] == fresh["sha256"].to_list()[::2]
    assert changed.table["score"][1] != fresh["score"][1]


def test_a_score_does_not_depend_on_the_videos_beside_it_or_on_what_a_pass_is_filled_up_with(run, monkeypatch):
    networks = networks_of_run(run)
    clips = np.stack([draw_clip(f"v{number}", 0, number % 2 == 0) for number in range(7)])[:, None]
    folds = (0, 1)
    alone = [networks.logits(folds, clips[[each]])[0].tolist() for each in range(7)]
    assert networks.logits(folds, clips).tolist() == alone
    monkeypatch.setattr("fvc_lib.tasks.video.verdicts.scoring.clips_in_a_pass", lambda _device, size: size)
    features, own = {}, {}
    together = networks.logits(folds, clips, features)  # passes of four, as on a GPU
    assert [networks.logits(folds, clips[[each]], own)[0].tolist() for each in (5, 2)] == together[[5, 2]].tolist()
    assert np.array_equal(np.concatenate(own[1]), features[1][0][[5, 2]])


def test_a_decoder_that_is_not_known_to_be_the_runs_is_said(run, monkeypatch):
    networks = networks_of_run(run)
    assert decoding_cautions(run, networks) == ()
    monkeypatch.setattr(networks, "config", networks.config.model_copy(update={"num_frames": 5}))
    (told,) = decoding_cautions(run, networks)
    assert "not known to be that which decoded the run's videos" in told
    assert decoding_cautions(RunPaths(run.root / "without"), networks) != ()
