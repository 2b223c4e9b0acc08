"""A run's detector as a folder of its own: it says what the run says, and nothing damaged or hostile is loaded."""

import json
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from click.testing import CliRunner

from fvc_lib.command_line.main import main
from fvc_lib.command_line.models import load_detector
from fvc_lib.detectors.network import weights_path
from fvc_lib.public import Detector
from fvc_lib.services.checkpoint_files import weights_digest, write_weights_with_digest
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import INDEX, KNOWN_VIDEOS, PREDICTIONS, read_table
from fvc_lib.tasks.bundle import write_bundle
from fvc_lib.tasks.predicting import Standing, predictor_of
from tests.kits.bundle_kit import Bomb, edited, sealed
from tests.kits.scored_run import copied_run, trained_run, write_video
from tests.kits.training import draw_clip

pytestmark = pytest.mark.usefixtures("warm_workers")

STANDING = Standing(standing="not shown", sentences=["Nothing is shown of the model."], scores=[])
OWN_NETWORK = """
import torch
from parts import bright

class MyNet(torch.nn.Module):
    num_frames, side = 4, 24
    licence = "CC0"

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def forward(self, frames):
        return self.line(bright(frames)[:, None]).squeeze(1)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("bundle")


@pytest.fixture(scope="module")
def run(home, scored_run) -> RunPaths:
    made = copied_run(scored_run, home)
    write_bundle(predictor_of(made, STANDING), home / "bundle", "---\n---\n")
    return made


@pytest.fixture
def bundle(run, home) -> Path:
    """Of a run; only copied."""
    return home / "bundle"


@pytest.fixture
def copy(bundle, tmp_path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


def test_a_bundle_scores_as_its_run_to_the_bit_without_the_run_and_the_corpus(run, bundle, home, tmp_path):
    new, near = tmp_path / "new.mp4", tmp_path / "near.mp4"
    write_video(new, draw_clip("unknown", 0, fake=True))
    write_video(near, np.clip(draw_clip("video00005", 0, fake=True).astype(int) + 2, 0, 255).astype(np.uint8))
    video = Path(shutil.copy(home / "corpus" / read_table(run.index, INDEX)["path"][3], tmp_path / "renamed.mp4"))
    asked = [new, tmp_path / "missing.mp4", video, Path(__file__), near]
    of_run = load_detector(run.root)
    by_run = {found.path: found for found in of_run.findings(asked, workers=1)}
    alone = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    home.rename(tmp_path / "away")
    try:
        detector = load_detector(alone)
        by_bundle = {found.path: found for found in detector.findings(asked, workers=1)}
    finally:
        (tmp_path / "away").rename(home)
    assert (detector.model_id, detector.identity) == (of_run.model_id, of_run.identity)
    assert by_bundle.pop(str(near)).no_prediction[0].startswith("A near-duplicate of a video of the run")
    assert "video00005" in by_run.pop(str(near)).no_prediction[0]
    assert by_bundle == by_run
    assert [found.path for found in by_bundle.values() if found.is_known] == [str(video)]
    first, missing, known, broken = Detector(detector).predict(asked[:4]).rows(named=True)
    assert 0 <= first["score_low"] < first["score"] < first["score_high"] <= 1
    assert "no such file" in missing["failure"]
    assert broken["failure"]
    stored = pl.concat([read_table(run.predictions(fold), PREDICTIONS) for fold in (0, 1)])
    assert known["score"] in stored["score"].to_list()  # one network tested it: no range
    assert (known["score_low"], known["score_high"]) == (None, None)


def test_tables_of_a_bundle_are_the_run_without_paths_and_names(run, bundle):
    stored = pl.concat([read_table(run.predictions(fold), PREDICTIONS) for fold in (0, 1)])
    known = read_table(bundle / "known_videos.parquet", KNOWN_VIDEOS)
    assert sorted(known.drop_nulls("score").select("label", "fold", "score").rows()) == sorted(
        stored.select("label", "fold", "score").rows()
    )
    assert known["group_id"].n_unique() == read_table(run.index, INDEX)["group_id"].n_unique()
    assert set(known["content_sha256"]) == set(read_table(run.index, INDEX)["content_sha256"])
    ranges = json.loads((bundle / "bundle.json").read_text())["section"]["ranges"]
    assert (ranges["codecs"], ranges["ranges"]["shorter side in pixels"][0]) == (["h264"], 24)
    assert ranges["ranges"]["length in seconds"][0] > 0
    names = [b"video000", b"group <", str(run.root.parents[2]).encode()]
    for file in bundle.rglob("*"):
        assert not file.is_file() or not any(name in file.read_bytes() for name in names), file


def refused(folder: Path, why: str, kind: type[FvcError] = UsageError) -> None:
    with pytest.raises(kind, match=why):
        load_detector(folder)


def refused_in_use(folder: Path, why: str, kind: type[FvcError] = UsageError) -> None:
    """Once the networks are loaded as well."""
    detector = load_detector(folder)
    with pytest.raises(kind, match=why):
        detector.check()


@pytest.mark.fault(45)
def test_a_file_that_is_damaged_missing_or_foreign_is_refused_by_name(copy):
    files = [file for file in copy.rglob("*") if file.is_file()]
    assert len(files) == 7
    for file in files:
        before = file.read_bytes()
        content = bytearray(before)
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        refused(copy, file.name)
        file.unlink()
        refused(copy, file.name)
        file.write_bytes(before)
    (copy / ".git").mkdir()
    (copy / ".git" / "config").touch()
    load_detector(copy)
    shutil.rmtree(copy / ".git")
    for foreign in ("sitecustomize.py", "weights.pkl"):
        (copy / foreign).touch()
        refused(sealed(copy), rf"'{foreign}' .*foreign")
        (copy / foreign).unlink()
    names = json.loads((copy / "digests.json").read_text())["files"]
    write_document(copy / "digests.json", {"files": {**names, "../../etc/passwd": "0" * 64}})
    refused(copy, r"'../../etc/passwd' is missing")
    (copy / "model/fold_1.safetensors").unlink()
    refused(sealed(copy), r"model/fold_1.safetensors is missing")
    (copy / "README.md").unlink()
    (copy / "README.md").symlink_to("/etc/passwd")
    refused(copy, r"'README.md' is a link")


@pytest.mark.fault(45)
def test_pickles_and_weights_of_another_network_are_refused_and_not_run(copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = copy / "model" / "fold_0.safetensors"
    weights = safetensors.torch.load(path.read_bytes())  # not mapped: the file is overwritten
    for content in (pickle.dumps(Bomb()), b"PK\x03\x04" + bytes(64)):
        path.write_bytes(content)
        refused_in_use(sealed(copy), r"fold_0.safetensors.* cannot be loaded safely", FvcError)
    assert not (tmp_path / "exploded").exists()
    name = next(iter(weights))
    write_weights_with_digest(path, {**weights, name: torch.zeros(3, 5)}, {})
    refused_in_use(sealed(copy), r"is not what .*fold 0 was judged by", FvcError)
    digests = json.loads((copy / "bundle.json").read_text())["weights"]
    digests["fold_0"] = weights_digest(safetensors.torch.load_file(path))
    refused_in_use(edited(copy, weights=digests), rf"do not fit [\s\S]*{name}")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": 5}, "format: Input should be 9"),
        ({"section": {"folds": []}}, "bundle.json, ranges"),
        ({"weights": {}}, "fold_0.safetensors is missing"),
        ({"name": "/../../../x"}, r"bundle.json, name"),
        ({"name": "run\x1b[2J"}, r"bundle.json, name"),
        ({"more": 1}, r"bundle.json, more: Extra"),
        ({"params": {"cache_dir": "/etc"}}, "the parameter 'cache_dir', which no bundle has"),
        ({"params": {"model_weights": "/etc/passwd"}}, "the parameter 'model_weights'"),
        ({"params": {"model": "/tmp/evil.py:Net"}}, "model names '/tmp/evil.py:Net', a file that is not in"),
        ({"params": {"model": "../evil.py:Net"}}, "a file that is not in network/"),
        ({"params": {"crop": "evil.py:find"}}, "a file that is not in crop/"),
        ({"params": {"model": "no_such_network"}}, "no_such_network"),
    ],
)
def test_a_record_that_no_export_writes_is_refused(copy, changes, why):
    params = json.loads((copy / "bundle.json").read_text())["params"]
    if "params" in changes:
        changes = {"params": {**params, **changes["params"]}}
    refused(edited(copy, **changes), why)


def test_other_folders_and_weights_of_a_run_or_a_bundle_are_refused(tmp_path, bundle, run):
    refused(tmp_path, r"neither a bundle .* nor a run folder.* export RUN")
    with pytest.raises(UsageError, match="is there already"):
        write_bundle(predictor_of(run), bundle, "")
    for path in (run.root, bundle, bundle / "model" / "fold_0.safetensors"):
        with pytest.raises(UsageError, match="may have seen the videos"):
            weights_path(str(path))


@pytest.mark.slow
def test_an_own_network_and_its_weights_are_copied_and_its_code_runs_only_where_allowed(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "parts.py").write_text("def bright(frames): return frames.float().mean((1, 2, 3, 4)) / 255\n")
    (tmp_path / "mine" / "my_net.py").write_text(OWN_NETWORK)
    weights = tmp_path / "mine" / "published.pth"
    torch.save({"line.weight": torch.ones(1, 1), "line.bias": torch.zeros(1)}, weights)
    run = trained_run(tmp_path, f"{tmp_path}/mine/my_net.py:MyNet", str(weights))
    write_bundle(predictor_of(run, STANDING), tmp_path / "bundle", "card")
    refused(tmp_path / "bundle", r"its model is code, network/my_net.py.*allow_code=True")
    video = next((tmp_path / "corpus").rglob("*.mp4"))
    by_run = list(load_detector(run.root).findings([video], workers=1))
    (tmp_path / "mine" / "my_net.py").write_text(OWN_NETWORK.replace("self.line(", "2 * self.line("))
    refused_in_use(run.root, r"MyNet has changed since its training \(.*MyNet.forward\)")
    shutil.rmtree(tmp_path / "mine")
    for name in [name for name in sys.modules if name == "parts" or name.startswith("fvc_user_my_net_")]:
        monkeypatch.delitem(sys.modules, name)  # as in a new process
    detector = load_detector(tmp_path / "bundle", allow_code=True)
    assert list(detector.findings([video], workers=1)) == by_run
    assert (tmp_path / "bundle" / "begun_with" / "model.safetensors").is_file()
    assert np.isfinite(by_run[0].logits).all()


def test_export_writes_a_model_card_with_the_standing_first(run, tmp_path):
    result = CliRunner().invoke(main, ["export", str(run.root), "--to", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "2 networks" in result.output
    assert "No result is recorded." in result.output
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: fvc\n")
    assert card.index("**No result is recorded.**") < card.index("## Data")
    assert "11,937 parameters were trained, 0 were not." in card
    assert str(run.root) not in card + (tmp_path / "out" / "bundle.json").read_text()
    assert load_detector(tmp_path / "out").standing.standing == "no result"


def test_another_decoder_than_the_runs_is_named(copy):
    assert not load_detector(copy).cautions
    (told,) = load_detector(edited(copy, decode_hash="0" * 64)).cautions
    assert "decoded by other code" in told
