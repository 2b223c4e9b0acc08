"""New files and models on features: a run and its bundle measure the same numbers of a file and judge by them."""

import numpy as np
import polars as pl
import pytest
import torch

from fvc_lib.command_line.models import load_detector
from fvc_lib.services.checkpoint_files import load_weights
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import run_config
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.tables import FINAL_VALIDATION, INDEX, PREDICTIONS, read_table
from fvc_lib.tasks.bundle import write_bundle
from fvc_lib.tasks.decoding import FileToScore
from fvc_lib.tasks.predicting import Standing, predictor_of
from fvc_lib.tasks.video.classical import described_in, fitted_model, probe
from fvc_lib.tasks.video.predicting import known_videos, networks_of_run, write_features
from fvc_lib.tasks.video.training import train_fold
from fvc_lib.tasks.video.verdicts.evidence import FORENSIC_NOTE, NO_FRAMES, file_evidence
from fvc_lib.tasks.video.verdicts.scoring import score_files
from tests.kits.scored_run import NUM_VIDEOS, enlarged, trained_run, write_video
from tests.kits.training import ListLog, draw_clip

pytestmark = pytest.mark.usefixtures("warm_workers")

STANDING = Standing(standing="not shown", sentences=["Nothing is shown of the model."], scores=[])


@pytest.fixture(scope="module", params=["forensic_boosting", "probe:efficientnet_lite0"])
def model(request):
    return request.param


@pytest.fixture(scope="module")
def home(tmp_path_factory, model):
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def run(home, model):
    made = trained_run(home, model, families="sharpness,packets", scale=4)
    write_document(made.run_json, {})
    return made


def test_a_file_of_the_run_measured_anew_gets_the_logit_that_its_own_fold_gave_it(run, home, model):
    networks = networks_of_run(run)
    index = read_table(run.index, INDEX)
    predictions = pl.concat([read_table(run.predictions(fold), PREDICTIONS) for fold in range(2)])
    asked = index.join(predictions, on="video_id").sort("video_id").head(3)
    files = [FileToScore(home / "corpus" / path, (fold,)) for path, fold in asked.select("path", "fold").rows()]
    for found in score_files(networks, files, workers=1):
        assert not found.failure
        ((_, logit),) = found.logits.items()
        rounding = 1e-12 if model == "forensic_boosting" else 1e-6
        assert logit == pytest.approx(asked["logit"][found.position], abs=rounding)


def test_run_and_bundle_judge_a_new_file_alike_and_name_a_bad_one(run, home):
    new, bad = home / "new.mp4", home / "bad.mp4"
    write_video(new, enlarged(draw_clip("another", 0, True), 4))
    bad.write_bytes(b"no video")
    write_bundle(predictor_of(run, STANDING), home / "bundle", "---\n---\n")
    assert {path.suffix for path in (home / "bundle" / "model").iterdir()} == {".safetensors"}
    assert described_in(home / "bundle" / "model" / "fold_0.safetensors")["features"]
    by_run, by_bundle = (
        {found.path: found for found in load_detector(each).findings([new, bad])}
        for each in (run.root, home / "bundle")
    )
    assert by_run == by_bundle
    assert np.isfinite(by_run[str(new)].logits).all()
    assert len(by_run[str(new)].logits) == 2
    assert not by_run[str(bad)].logits
    assert "unreadable" in by_run[str(bad)].failure


@pytest.mark.slow
def test_the_model_of_all_groups_judges_alone_and_was_calibrated_on_held_out_logits_of_all(run, home):
    new = home / "for_final.mp4"
    write_video(new, enlarged(draw_clip("a third", 0, True), 4))
    outcome = train_fold(run, run_config(run.params_yaml), metric_log=ListLog())
    assert (outcome.num_train, outcome.num_test, outcome.control) == (NUM_VIDEOS, 0, None)
    chose = read_table(run.final_validation, FINAL_VALIDATION)
    assert set(chose["video_id"]) == set(read_table(run.index, INDEX)["video_id"])
    assert train_fold(run, run_config(run.params_yaml), metric_log=ListLog()).train_anew
    write_features(run, final=True)  # as 04b does
    write_bundle(predictor_of(run, STANDING, final=True), home / "final", "---\n---\n")
    (by_run,) = load_detector(run.root, final=True).findings([new])
    (logit,) = by_run.logits
    assert [by_run] == list(load_detector(home / "final", final=True).findings([new]))
    (by_folds,) = load_detector(run.root).findings([new])
    assert logit not in by_folds.logits


def test_windows_and_maps_are_refused_in_words_and_the_rest_of_the_page_is_there(run, home):
    networks = networks_of_run(run)
    index = read_table(run.index, INDEX).sort("video_id")
    row = {"path": str(home / "corpus" / index["path"][0]), "sha256": index["content_sha256"][0]}
    known = known_videos(run, [0, 1])
    found = file_evidence(networks, known, row, map_minutes=1.0)
    assert found.provenance
    if networks.sees_frames:  # all windows together see the frames of the clip
        assert found.windows.note.endswith(FORENSIC_NOTE)
        score = known.rows.filter(content_sha256=row["sha256"])["score"][0]
        assert found.windows.scores.min() - 1e-6 <= score <= found.windows.scores.max() + 1e-6
    else:
        assert (found.windows, found.occlusion, found.note) == (None, None, NO_FRAMES)


def test_a_model_is_not_judged_with_other_features_or_incomplete_arrays(run):
    path, config = run.fold_checkpoints(0) / "best_model.safetensors", run_config(run.params_yaml)
    weights, networks = load_weights(path), networks_of_run(run)
    with pytest.raises(UsageError, match=r"such as sharpness|no family of pixels"):
        fitted_model(path, weights, config.model_copy(update={"feature_families": "packets"}))
    assert np.isfinite(fitted_model(path, weights, config).logits([{}])).all()
    for name in weights:
        rest = {other: array for other, array in weights.items() if other != name}
        if "/" not in name:
            with pytest.raises(UsageError, match=f"best_model.safetensors.*arrays do not fit.*'{name}'"):
                fitted_model(path, rest, config)
            continue
        others = {other: array for other, array in weights.items() if not other.startswith(name.partition("/")[0])}
        for bad in (rest, others, {**rest, name: torch.ones(1, 1)}, {**rest, name: torch.ones(7)}):
            says = "the array '[a-z]+' is missing|its arrays do not fit"
            with pytest.raises(UsageError, match=f"best_model.safetensors.*({says})"):
                _ = fitted_model(path, bad, config), probe(networks._trunk, config, path, bad)
