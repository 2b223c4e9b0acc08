"""New files and models on features: a run and its bundle measure the same numbers of a file and judge by them."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from fvc_lib import load_detector
from fvc_lib.analysis.figures.evidence.when import Known
from fvc_lib.command_line.verdicts.pages import sections_of
from fvc_lib.services.checkpoint_files import load_weights
from fvc_lib.services.errors import UsageError
from fvc_lib.services.parameters import run_config
from fvc_lib.services.tables import FEATURES, INDEX, PREDICTIONS, read_table
from fvc_lib.tasks.bundle_folder import Standing
from fvc_lib.tasks.video.classical.judging import described_in, fitted_model
from fvc_lib.tasks.video.traces import KnownTraces, RealQuantiles
from fvc_lib.tasks.video.verdicts.bundle import BundleNetworks, write_bundle
from fvc_lib.tasks.video.verdicts.evidence import FileEvidence, file_evidence
from fvc_lib.tasks.video.verdicts.rule import KnownVideos
from fvc_lib.tasks.video.verdicts.scoring import RunNetworks
from tests.kits.scored_run import enlarged, trained_run, write_video
from tests.kits.training import draw_clip

pytestmark = pytest.mark.usefixtures("warm_workers")

FRAME = np.random.default_rng(0).integers(0, 256, (96, 96), np.uint8)
STANDING = Standing(standing="not shown", sentences=["Nothing is shown of the model."], scores=[])


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def run(home):
    made = trained_run(home, "forensic_boosting", families="sharpness,packets", scale=4)
    made.run_json.write_text("{}")
    return made


def test_a_file_of_the_run_measured_anew_gets_the_logit_that_its_own_fold_gave_it(run, home):
    networks = RunNetworks(run)
    index = read_table(run.index, INDEX)
    predictions = pl.concat([read_table(run.predictions(fold), PREDICTIONS) for fold in range(2)])
    asked = index.join(predictions, on="video_id").sort("video_id").head(3)
    files = [(home / "corpus" / path, content) for path, content in asked.select("path", "content_sha256").rows()]
    for place, found, failure in networks.measurer.measure(files):
        assert not failure
        fold = asked["fold"][place]
        logit = networks.fitted(fold).logits([found])[0] + networks.folds[fold].prior_logit
        assert logit == pytest.approx(asked["logit"][place], abs=1e-12)


def test_run_and_bundle_judge_a_new_file_alike_and_name_a_bad_one(run, home):
    new, bad = home / "new.mp4", home / "bad.mp4"
    write_video(new, enlarged(draw_clip("another", 0, True), 4))
    bad.write_bytes(b"no video")
    write_bundle(run, home / "bundle", STANDING, "---\n---\n")
    assert {path.suffix for path in (home / "bundle" / "model").iterdir()} == {".safetensors", ".sha256"}
    assert described_in(home / "bundle" / "model" / "fold_0.safetensors")["features"]
    by_run = load_detector(run.root).predict([new, bad])
    by_bundle = load_detector(home / "bundle").predict([new, bad])
    assert by_run == by_bundle
    assert 0 <= by_run[0].low <= by_run[0].score <= by_run[0].high <= 1
    assert by_run[0].folds == (0, 1)
    assert by_run[1].score is None
    assert "unreadable" in by_run[1].failure


def test_a_page_sets_a_file_beside_the_nearest_videos_and_the_run_s_reals(run, home):
    networks, known = RunNetworks(run), KnownVideos.of(RunNetworks(run).paths, [0, 1])
    write_video(home / "third.mp4", enlarged(draw_clip("third", 0, True), 4))
    traces = KnownTraces(networks, known)
    new = file_evidence(networks, known, {"path": str(home / "third.mp4"), "sha256": ""}, traces=traces).traces
    titles = [f"nearest {label} of the run's 6 with known features" for label in ("real", "fake")]
    assert [each.title for each in new.frames] == ["this video", *titles]
    table = read_table(run.features, FEATURES)
    assert new.num_reals == table.filter(label="real").height
    assert {each.family for each in new.features} == {"sharpness", "packets"}
    ends = [abs(each.quantile - 0.5) for each in new.features]
    assert ends == sorted(ends, reverse=True)
    page = str(sections_of(FileEvidence({}, (), traces=new), Known(np.array([0.1]), np.array([0.9])))[0].html)
    assert page.count("<img") == 3 * 3
    assert page.count("<svg") == 3 * 2 + len(new.features)
    assert len(page) < 200_000
    assert str(home) not in page

    unchecked = RunNetworks(run)
    unchecked.config = networks.config.model_copy(update={"near_duplicate_bits": 0})
    alone = KnownTraces(unchecked, known).of({"path": str(home / "third.mp4"), "sha256": ""}, FRAME, {})
    assert len(alone.frames) == 1
    assert [each for each in alone.notes if "may be a copy of the nearest" in each]

    own = known.rows.row(0, named=True)
    row = {"path": str(home / "corpus" / own["path"]), "sha256": own["content_sha256"]}
    of_own = file_evidence(networks, known, row, traces=traces).traces
    assert not [each for each in of_own.frames[1:] if own["video_id"] in each.name], "a video is not its own neighbour"
    stored = table.filter(video_id=own["video_id"]).row(0, named=True)
    assert [each.value for each in of_own.features] == [stored[each.column] for each in of_own.features]

    write_bundle(run, home / "page_bundle", STANDING, "---\n---\n")
    bundle = BundleNetworks(home / "page_bundle")
    quantiles = (home / "page_bundle" / "forensic_quantiles.safetensors").stat()
    assert quantiles.st_size < 20_000
    assert quantiles.st_mode & 0o777 == 0o644
    beside = KnownTraces(bundle, bundle.known_videos(), quantiles=bundle.quantiles())
    by_bundle = file_evidence(
        bundle, bundle.known_videos(), {"path": str(home / "third.mp4"), "sha256": ""}, traces=beside
    ).traces
    assert by_bundle.features == new.features
    assert len(by_bundle.frames) == 1
    assert [each for each in by_bundle.notes if "beside it: its corpus is not here" in each]


def test_quantiles_are_shares_of_the_reals_and_what_no_export_writes_is_refused():
    table = pl.DataFrame({"label": ["real"] * 5 + ["fake"], "sharpness_edges_mean": [0.0, 1, 2, 3, 4, 50]})
    known = RealQuantiles.of(table)
    shares = [known.placed({"sharpness_edges_mean": value})[0].quantile for value in (-1, 2, 99)]
    assert shares == [0, pytest.approx(0.5), 1]
    assert known.placed({"sharpness_edges_mean": np.nan, "packets_tiny": 1.0}) == []
    whole = known.arrays()
    (again,) = RealQuantiles.of_arrays(whole).placed({"sharpness_edges_mean": 3})
    assert again.quantile == pytest.approx(0.75, abs=0.01)
    descending = {"sharpness_edges_mean": whole["sharpness_edges_mean"][::-1]}
    for changed in ({"num_videos": np.array([0])}, descending, {"sharpness_edges_mean": np.zeros(3, np.float32)}):
        with pytest.raises(ValueError, match="wanted"):
            RealQuantiles.of_arrays(whole | changed)


def test_reals_of_any_number_come_back_from_a_file():
    many = RealQuantiles(100_001, {"sharpness_edges_mean": np.linspace(0, 1, 101, dtype=np.float32)})
    again = RealQuantiles.of_arrays(many.arrays())
    assert again.num_videos == 100_001
    assert again.percentiles.keys() == many.percentiles.keys()


def test_no_page_generates_the_sample_corpus(run, home):
    networks = RunNetworks(run)
    (home / "data").mkdir()
    networks.config = networks.config.model_copy(update={"corpus": "", "data_dir": str(home / "data")})
    traces = KnownTraces(networks, KnownVideos.of(run, [0, 1]))
    found = traces.of({"path": str(home / "corpus" / "real" / "none.mp4"), "sha256": ""}, FRAME, {})
    assert [each for each in found.notes if "is not here" in each]
    assert not list((home / "data").iterdir())


def test_windows_and_maps_are_refused_in_words_and_the_rest_of_the_page_is_there(run, home):
    networks = RunNetworks(run)
    with pytest.raises(UsageError, match="no maps of where"):
        networks.network(0)
    index = read_table(run.index, INDEX).sort("video_id")
    row = {"path": str(home / "corpus" / index["path"][0]), "sha256": index["content_sha256"][0]}
    found = file_evidence(networks, KnownVideos.of(run, [0, 1]), row, map_minutes=1.0)
    assert found.windows is None
    assert found.maps is None
    assert [each for each in found.failures if "no scores of windows" in each]
    assert found.footage is not None


def test_a_model_is_written_in_no_network_s_form_and_not_judged_with_other_features(run, home):
    with pytest.raises(UsageError, match="no network on clips"):
        write_bundle(run, home / "other", STANDING, "", form="torch_export")
    path = run.fold_checkpoints(0) / "best_model.safetensors"
    config = run_config(run).model_copy(update={"feature_families": "packets"})
    with pytest.raises(UsageError, match="not measured here, such as sharpness"):
        fitted_model(path, load_weights(path), config)
    assert np.isfinite(fitted_model(path, load_weights(path), run_config(run)).logits([{}])).all()
