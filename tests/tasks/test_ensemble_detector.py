"""Ensembles of trained runs, and the files that they judge."""

import json
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy.special import expit

from fvc_lib.command_line.models import load_detector
from fvc_lib.public import Detector
from fvc_lib.services.errors import DataError, FvcError, UsageError
from fvc_lib.services.parameters import run_config
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import (
    INDEX,
    LEAKAGE_AUDIT,
    PREDICTIONS,
    frame_of,
    read_table,
    write_table,
)
from fvc_lib.tasks.bundle import write_bundle
from fvc_lib.tasks.predicting import Standing, predictor_of
from fvc_lib.tasks.video import ensembles
from fvc_lib.tasks.video.predicting import Finding
from tests.kits.bundle_kit import edited, sealed
from tests.kits.scored_run import trained_run, write_video
from tests.kits.training import draw_clip

pytestmark = pytest.mark.usefixtures("warm_workers")

STANDING = Standing(standing="not shown", sentences=["Nothing is shown of the model."], scores=[])


@pytest.fixture(scope="module")
def runs(scored_run, tmp_path_factory) -> list[RunPaths]:
    """Two networks on the same folds; only read."""
    home = tmp_path_factory.mktemp("ensemble")
    first = RunPaths(shutil.copytree(scored_run.root, home / "runs" / scored_run.run_id))
    made = [first, trained_run(home / "other", learning_rate=0.03)]
    for run in made:
        write_document(run.run_json, {})
        write_table(frame_of([], LEAKAGE_AUDIT), LEAKAGE_AUDIT, run.leakage_audit)
    return made


@pytest.fixture
def copies(runs, tmp_path) -> list[RunPaths]:
    return [RunPaths(shutil.copytree(run.root, tmp_path / f"run_{place}")) for place, run in enumerate(runs)]


def members_of(runs: list[RunPaths]) -> list[ensembles.Member]:
    tables = [[read_table(run.predictions(fold), PREDICTIONS) for fold in (0, 1)] for run in runs]
    return [
        ensembles.Member(run, run_config(run.params_yaml), pl.concat(parts).sort("video_id"), place)
        for place, (run, parts) in enumerate(zip(runs, tables, strict=True))
    ]


def ensemble_in(folder: Path, runs: list[RunPaths]) -> RunPaths:
    made, members = RunPaths(folder), members_of(runs)
    ensembles.write_ensemble(made, members, ["one", "other"], ensembles.combined(members), members[0].config)
    return made


@pytest.mark.slow
def test_a_new_file_gets_each_members_score_by_fold_together_and_a_known_one_its_stored_score(
    runs, tmp_path, monkeypatch
):
    new = tmp_path / "new.mp4"
    write_video(new, draw_clip("unknown", 0, fake=True))
    index = read_table(runs[0].index, INDEX)
    known = Path(run_config(runs[0].params_yaml).corpus) / index["path"][3]
    alone = [next(load_detector(run.root).findings([new], workers=1)).logits for run in runs]
    folder = ensemble_in(tmp_path / "ensemble_mean", runs)
    detector = load_detector(folder.root)
    by_fold = expit(np.array(alone)).mean(0)
    answers = Detector(detector).predict([new, known, tmp_path / "none.mp4"])
    of_new, of_known, nothing = answers.rows(named=True)
    assert of_new["score"] == pytest.approx(np.mean(by_fold), abs=1e-6)
    assert (of_new["score_low"], of_new["score_high"]) == pytest.approx((by_fold.min(), by_fold.max()), abs=1e-6)
    stored = pl.concat([read_table(folder.predictions(fold), PREDICTIONS) for fold in (0, 1)])
    assert of_known["score"] == pytest.approx(stored.filter(video_id=index["video_id"][3])["score"][0], abs=1e-12)
    assert index["video_id"][3] in " ".join(of_known["reasons"])
    assert nothing["failure"]
    assert detector.model_id.startswith("ensemble_mean@")

    def unscored(probed, _failure):
        return Finding(probed.path, failure="torn")

    monkeypatch.setattr(detector.members[1], "_unscored", unscored)
    assert Detector(detector).predict([new, known])["failure"].to_list() == ["torn", None]


@pytest.mark.slow
def test_a_bundle_judges_as_its_ensemble_and_nothing_damaged_or_foreign_is_loaded(runs, tmp_path):
    folder = ensemble_in(tmp_path / "ensemble_mean", runs)
    bundle = tmp_path / "bundle"
    write_bundle(predictor_of(folder, STANDING), bundle, "the card")
    home = str(runs[1].root.parents[2]).encode()
    assert not any(home in file.read_bytes() for file in bundle.rglob("*") if file.is_file())
    new = tmp_path / "new.mp4"
    write_video(new, draw_clip("unknown", 0, fake=True))
    of_run, of_bundle = load_detector(folder.root), load_detector(bundle)
    assert of_bundle.standing == STANDING
    found = [next(each.findings([new], workers=1)) for each in (of_run, of_bundle)]
    assert found[0].logits == found[1].logits
    assert of_run.known.tested["logit"].sort().equals(of_bundle.known.tested["logit"].sort())

    member = bundle / "members/1"
    params = json.loads((member / "bundle.json").read_text())["params"]
    (member / "network").mkdir()
    (member / "network/evil.py").write_text("raise SystemExit('ran')")
    edited(member, params=params | {"model": "evil.py:Net"})
    with pytest.raises(UsageError, match="allow_code=True"):
        load_detector(sealed(bundle))
    (member / "model/fold_0.safetensors").write_bytes(b"torn")
    with pytest.raises(FvcError):
        load_detector(bundle)


@pytest.mark.slow
def test_a_member_that_was_trained_anew_is_no_member_any_more(copies, tmp_path):
    folder = ensemble_in(tmp_path / "ensemble_mean", copies)
    load_detector(folder.root)
    shutil.copytree(copies[0].fold_checkpoints(1), copies[0].fold_checkpoints(0), dirs_exist_ok=True)
    with pytest.raises(DataError, match="since it became a member"):
        load_detector(folder.root)
