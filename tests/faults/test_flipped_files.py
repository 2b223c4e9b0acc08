"""Row 40: one flipped bit in any kind of file that a later command reads; the command names the file, or redoes it."""

import random
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fvc_lib.analysis.read.queries import default_selection
from fvc_lib.command_line.main import main
from fvc_lib.corpus.probing import VIDEO_FILES, probe_files
from fvc_lib.execution.plan import Fingerprint, record_finished
from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.stages import tasks_in_order
from fvc_lib.services.checkpoint_files import BEST
from fvc_lib.services.errors import DataError
from fvc_lib.services.parameters import run_config
from fvc_lib.services.records.digests import refuse_damaged
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import AUGMENTED, INDEX, read_table
from fvc_lib.tasks.journal import Journal
from fvc_lib.tasks.video.features import FeatureSource
from fvc_lib.tasks.video.predicting import Finding
from fvc_lib.video.clips.shards import ClipShards, write_shards
from fvc_lib.video.clips.store import ClipStore, write_with_digest
from tests.kits.scored_run import copied_run

NOTHING = Fingerprint({}, {}, "", {}, "")
# Files of a finished run that its records check.
RECORDED = (
    "tables/index.parquet", "tables/folds.parquet", "tables/predictions_fold_0.parquet",
    "tables/validation_predictions_fold_1.parquet", "tables/augmented_metadata.csv", "checkpoints/fold_0/outcome.json",
    "checkpoints/fold_1/selection.json", "checkpoints/stage_04_fold_training_fold_0.json", "params.yaml", "run.json",
    "metrics/04_fold_training_fold_0.jsonl", "status.json",
)  # fmt: skip
# By command: a file that it must refuse by name, and its arguments.
READERS = {
    "report": ("tables/predictions_fold_0.parquet", "report {run}"),
    "compare": ("checkpoints/fold_0/outcome.json", "compare {run} {other}"),
    "export": (f"checkpoints/fold_1/{BEST}", "export {run} --to {out}"),
    "predict": ("tables/folds.parquet", "predict {run} {video} --out {out}"),
    "resume": ("params.yaml", "--resume {run} --dry-run"),
    "fork": ("run.json", "--resume {run} --fork -p epochs 2 --dry-run"),
    "robustness": ("run.json", "robustness {run}"),
    "export-mlflow": ("metrics/04_fold_training_fold_0.jsonl", "export {run} --format mlflow"),
}


@contextmanager
def flipped(path: Path, chance: random.Random) -> Iterator[None]:
    """Flip one bit of the file, not in the name of its own digest; restore it at the end."""
    whole = path.read_bytes()
    # Under another name nothing is checked, and nothing else is wrong either.
    name, own = whole.find(b'"document_sha256"'), 17
    places = [place for place in range(len(whole)) if name < 0 or not name <= place < name + own]
    place, bit = chance.choice(places), 1 << chance.randrange(8)
    path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
    try:
        yield
    finally:
        path.write_bytes(whole)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flipped")


@pytest.fixture(scope="module")
def run(home: Path, scored_run: RunPaths) -> RunPaths:
    """Return a run of two trained folds with the records that the runner leaves."""
    made = copied_run(scored_run, home)
    begun = begin_run(
        run_config(made.params_yaml).model_copy(update={"runs_dir": str(home / "begun")}), command="first"
    )
    for name in ("run.json", "params.yaml", "status.json"):
        shutil.copyfile(begun.root / name, made.root / name)
    for task in tasks_in_order(run_config(made.params_yaml)):
        if all(path.is_file() for path in task.stage.outputs(made, task.fold)[:1]):
            record_finished(task, NOTHING, made)
    return made


@pytest.mark.fault(40)
@pytest.mark.parametrize("name", RECORDED)
def test_a_flipped_bit_of_a_recorded_file_is_noticed_and_named(run, home, name, tally):
    chance = random.Random(f"flips {name}")
    for _ in range(4):
        with flipped(run.root / name, chance):
            with pytest.raises(DataError, match=re.escape(name)):
                refuse_damaged(run.root)
            with pytest.raises(DataError, match=Path(name).name):
                default_selection(home / "runs", run.run_id)
        tally.add(survived=1)
    refuse_damaged(run.root)


@pytest.mark.fault(40)
@pytest.mark.parametrize("command", READERS)
def test_each_command_refuses_a_file_with_a_flipped_bit_by_name(run, home, tmp_path, monkeypatch, command):
    monkeypatch.setenv("FVC_RUNS_DIR", str(home / "runs"))
    name, words = READERS[command]
    video = next((home / "corpus" / "real").glob("*.mp4"))
    other, out = tmp_path / "run_20260102_000000_00000000", tmp_path / "out"
    if "{other}" in words:
        shutil.copytree(run.root, other)
    arguments = [word.format(run=run.root, other=other, out=out, video=video) for word in words.split()]
    with flipped(run.root / name, random.Random(command)):
        done = CliRunner().invoke(main, arguments)
    assert done.exit_code in (1, 2, 3), done.output
    assert Path(name).name in done.output
    assert "Traceback" not in done.output
    assert command == "predict" or not out.exists()


@pytest.mark.fault(40)
def test_a_flipped_bit_of_a_cached_file_is_refused_by_name_at_its_first_reading(run, tmp_path):
    config, chance = run_config(run.params_yaml), random.Random("cached")
    store = ClipStore.of(config)
    clip = store.clip_path(read_table(run.index, INDEX)["video_id"][0], 0)
    frames = np.empty(store.shape, np.uint8)
    shards = write_shards(store, read_table(run.augmented_metadata, AUGMENTED))
    asked = ("abcd", 0, 0)
    features = FeatureSource(None, tmp_path, (2, 3)).path(asked)
    features.parent.mkdir()
    np.save(tmp_path / "plain.npy", np.zeros((2, 3), np.float32))
    with features.open("wb") as stream:
        write_with_digest(stream, (tmp_path / "plain.npy").read_bytes())
    for path, read in (
        (clip, lambda: ClipStore.of(config).read(clip.stem, 0)),
        (clip, lambda: ClipStore.of(config).load(clip.stem, 0, frames)),
        (features, lambda: FeatureSource(None, tmp_path, (2, 3)).features([asked])),
        (shards / "manifest.json", lambda: ClipShards(shards)),
        (shards / "clips-000000.tar", lambda: ClipShards(shards)),
    ):
        read()
        for _ in range(20):
            with flipped(path, chance), pytest.raises(DataError, match=path.name):
                read()


@pytest.mark.fault(40)
def test_facts_of_videos_with_a_flipped_bit_are_probed_again_and_equal(run, home, tmp_path):
    paths = read_table(run.index, INDEX)["path"].to_list()
    known, _ = probe_files(VIDEO_FILES, home / "corpus", paths, tmp_path, workers=1)
    (facts,) = tmp_path.glob("probes_*.jsonl")
    with flipped(facts, random.Random("measured")):
        again, num_known = probe_files(VIDEO_FILES, home / "corpus", paths, tmp_path, workers=1)
        assert again == known
        assert num_known >= len(paths) - 2  # a flipped line feed joins two lines


@pytest.mark.fault(40)
def test_no_finding_with_a_flipped_bit_is_taken_from_a_journal(tmp_path):
    videos, chance = [tmp_path / f"{number}.mp4" for number in range(3)], random.Random("findings")
    for video in videos:
        video.write_bytes(video.name.encode())
    journal = Journal(tmp_path, "a model", Finding)
    journal.known(videos)
    findings = {str(v): Finding(path=str(v), sha256=v.stem, logits=(0.25, -0.5)) for v in videos}
    for finding in findings.values():
        journal.append(finding)
    journal.close()
    for _ in range(20):
        with flipped(tmp_path / "findings.jsonl", chance):
            again = Journal(tmp_path, "a model", Finding)
            found = again.known(videos)
            again.close()
        assert found.items() < findings.items()
