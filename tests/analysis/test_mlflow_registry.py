"""A bundle in MLflow's model registry, in a real store: its versions score as the run, and nothing else is loaded."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from fvc_lib import load_detector
from fvc_lib.analysis.mlflow.export import artifact_location, connected, default_tracking_uri
from fvc_lib.analysis.mlflow.registry import fetched_bundle, model_and_alias, register_bundle
from fvc_lib.command_line.main import main
from fvc_lib.command_line.models import find_model
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.tasks.bundle import write_bundle
from fvc_lib.tasks.predicting import Standing, predictor_of
from tests.kits.scored_run import trained_run, write_video
from tests.kits.training import draw_clip

pytestmark = pytest.mark.mlflow

STANDING = Standing(standing="not shown", sentences=["Nothing is shown of the model."], scores=[])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunPaths:
    made = trained_run(tmp_path_factory.mktemp("registry"))
    made.run_json.write_text("{}")
    return made


@pytest.fixture(scope="module")
def bundles(run, tmp_path_factory) -> list[Path]:
    """Two of other content."""
    folder = tmp_path_factory.mktemp("bundles")
    for name in ("first", "second"):
        write_bundle(predictor_of(run, STANDING), folder / name, f"{name}\n")
    return [folder / "first", folder / "second"]


@pytest.fixture(scope="module")
def store(run, bundles) -> str:
    """With both as versions of one model, the second registered twice."""
    uri = default_tracking_uri(run.root.parent.parent, {})
    made = [
        register_bundle(bundle, "news", alias, experiment="default", run_id=run.run_id, tracking_uri=uri)
        for bundle, alias in ((bundles[0], "champion"), (bundles[1], ""), (bundles[1], "challenger"))
    ]
    assert [(each.version, each.is_new) for each in made] == [("1", True), ("2", True), ("2", False)]
    assert [each.uri for each in made] == ["models:/news@champion", "models:/news/2", "models:/news@challenger"]
    return uri


@pytest.fixture
def here(run, store, tmp_path, monkeypatch) -> Path:
    """The runs folder as a command finds it; a cache of its own."""
    monkeypatch.setenv("FVC_RUNS_DIR", str(run.root.parent.parent))
    monkeypatch.setenv("FVC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return run.root.parent.parent


def test_a_registered_model_scores_as_its_run_and_its_bundle(run, bundles, here, tmp_path):
    write_video(tmp_path / "new.mp4", draw_clip("unknown", 0, fake=True))
    asked = [tmp_path / "new.mp4", tmp_path / "missing.mp4"]
    by_run, by_bundle, by_alias, by_version = (
        load_detector(each).predict(asked, workers=1)
        for each in (run.root, bundles[0], "models:/news@champion", "models:/news/2")
    )
    assert by_run == by_bundle == by_alias == by_version
    assert by_alias[0].score is not None
    assert (find_model(here, "models:/news@champion") / "README.md").read_text() == "first\n"
    assert (find_model(here, "models:/news@challenger") / "README.md").read_text() == "second\n"


def test_what_is_fetched_is_what_was_registered_or_nothing(here, store, tmp_path):
    folder = find_model(here, "models:/news@champion")
    assert folder.is_relative_to(tmp_path / "cache")
    weights = folder / "model" / "fold_0.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UsageError, match=r"fold_0.safetensors' is damaged"):
        load_detector("models:/news@champion")
    shutil.rmtree(folder)
    with connected(store) as client:
        source = Path(client.get_model_version("news", "1").source.removeprefix("file://"))
    kept = (source / "digests.json").read_text()
    (source / "digests.json").write_text(json.dumps({"files": {}}))
    try:
        with pytest.raises(FvcError, match=r"models:/news@champion.* is not the bundle that was registered"):
            find_model(here, "models:/news@champion")
    finally:
        (source / "digests.json").write_text(kept)
    assert not list(folder.parent.iterdir())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("models:/news", "wanted models:/NAME@ALIAS"),
        ("models:/news@nobody", "no such model, version or alias. Models there: .*news"),
        ("models:/news/9", "no such model, version or alias"),
        ("models:/../x@y", "wanted models:/NAME@ALIAS"),
        ("models:/foreign/1", "is no bundle that export-mlflow registered"),
    ],
)
def test_what_the_registry_does_not_have_is_said(here, store, name, why):
    if "foreign" in name:
        with connected(store) as client:
            client.create_registered_model("foreign")
            client.create_model_version("foreign", artifact_location(store, "default"))
    with pytest.raises(UsageError, match=why):
        load_detector(name)


def test_asking_makes_no_store_where_there_is_none(tmp_path):
    uri = default_tracking_uri(tmp_path, {})
    with pytest.raises(UsageError, match="there is no MLflow store"):
        fetched_bundle("models:/news@champion", tracking_uri=uri, cache_dir=tmp_path / "cache")
    assert not list(tmp_path.iterdir())


def test_only_one_run_becomes_a_version_and_names_are_checked(here):
    assert model_and_alias("news@champion") == ("news", "champion")
    assert model_and_alias("news") == ("news", "")
    for arguments, why in (
        (["a", "b", "--register", "news"], "is for one run, got 2"),
        (["latest", "--register", "a/b@c"], "wanted NAME or NAME@ALIAS"),
    ):
        done = CliRunner().invoke(main, ["export-mlflow", *arguments])
        assert done.exit_code == 2
        assert why in done.output
