"""``run_notebooks.py shard``: what shards found, in any number, is what the notebooks' calls would have found."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from fvc_lib.command_line.main import main
from fvc_lib.command_line.shards import STAGES_WITH_SHARDS
from fvc_lib.corpus.index import build_index
from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.shards import Shard, read_shard, record_path
from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.config import RunConfig
from fvc_lib.services.isolated_workers import SUSPECTS
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import AUGMENTED, INDEX, read_table
from fvc_lib.services.tasks import STAGES
from fvc_lib.tasks.video.data import made_clips, open_clips
from fvc_lib.tasks.video.features import with_features
from fvc_lib.video.clips.making import make_clips
from fvc_lib.video.clips.store import ClipStore
from fvc_lib.video.features.measuring import measure_features

STAGES_ON_FILES = ("01_data_index", "03_augmentation", "03b_forensic_features", "04_fold_training")


@pytest.fixture
def corpus(tmp_path, make_video) -> Path:
    folder = tmp_path / "videos"
    for seed in range(6):
        make_video(folder / ("real" if seed % 2 else "fake") / f"{seed}.mp4", seed)
    (folder / "real" / "copy.mp4").write_bytes((folder / "real" / "1.mp4").read_bytes())
    (folder / "fake" / "broken.mp4").write_bytes(b"no video")
    return folder


def config_of(corpus: Path, folder: Path) -> RunConfig:
    values = {
        "corpus": str(corpus), "runs_dir": str(folder / "runs"), "cache_dir": str(folder / "cache"), "canonical": True,
        "fixed_size": 32, "num_frames": 4, "forensic_features": True, "feature_families": "sharpness,packets",
        "model": "efficientnet_lite0", "tune": "head", "device": "cpu",
    }  # fmt: skip
    return resolve_config(values, environ={})


class Notebooks:
    """What the notebooks of the three stages call, and what they said was known before."""

    def __init__(self, config: RunConfig, run: RunPaths) -> None:
        self.config, self.run = config, run

    def index(self, workers: int = 0) -> int:
        config = self.config.model_copy(update={"max_rejected_share": 0.5, "workers": workers})
        return build_index(config.corpus, config, self.run.index.parent).num_known

    def clips(self, workers: int = 0) -> int:
        index, store = read_table(self.run.index, INDEX), ClipStore.of(self.config)
        return make_clips(store, index, self.config.corpus, 2, self.run.augmented_metadata, workers=workers).reused

    def features(self, workers: int = 0) -> int:
        config, index = self.config, read_table(self.run.index, INDEX)
        return measure_features(
            index, config.corpus, config.feature_families, config.cache_dir, self.run.features, recipe=config.recipe,
            workers=workers,
        ).reused  # fmt: skip

    def trunk_features(self) -> int:
        """How many clips' features there are to begin with; all, when it ends."""
        config, seen = self.config, list[int]()
        made = read_table(self.run.augmented_metadata, AUGMENTED)
        with_features(
            open_clips(config, made), made_clips(made), config, torch.device("cpu"), begin=0.0, stop=lambda: False,
            progress=lambda done, _total: seen.append(done),
        )  # fmt: skip
        return seen[0]

    def written(self) -> dict[str, str]:
        """The hash of every table and clip."""
        tables = [path for path in sorted(self.run.tables.iterdir()) if path.is_file()]
        cache = Path(self.config.cache_dir)
        # Those of a frozen trunk lie beside the clips.
        clips = {path.relative_to(cache).as_posix(): path for path in sorted((cache / "clips").rglob("*.npy"))}
        return {name: sha256_of_file(path) for name, path in ({path.name: path for path in tables} | clips).items()}


@pytest.mark.slow
def test_any_number_of_shards_leaves_nothing_to_the_notebooks_and_changes_no_bit(corpus, tmp_path, warm_workers):
    (there := tmp_path / "there").mkdir()
    config = config_of(corpus, there)
    run = begin_run(config, command="a test")
    sharded = Notebooks(config, run)

    def shard(stage: str, name: str) -> str:
        done = CliRunner().invoke(main, ["shard", str(run.root), stage, name])
        assert done.exit_code == 0, done.output
        return done.output

    for number in (2, 0, 1):
        shard("01", f"{number}/3")
    assert sharded.index() == 7
    for stage, of in (("03", 2), ("03b", 3)):
        for number in range(of):
            shard(stage, f"{number}/{of}")
    assert (sharded.clips(), sharded.features()) == (18, 6)
    for number in (1, 0, 2, 3):
        shard("04", f"{number}/4")
    assert sharded.trunk_features() == 18
    record = read_shard(record_path(run.root, "03_augmentation", Shard(0, 2)))
    assert (record.state, record.done) == ("done", record.total)
    assert SUSPECTS.in_hand is None

    config = config_of(corpus, tmp_path / "here")
    alone = Notebooks(config, begin_run(config, command="a test"))
    assert (alone.index(3), alone.clips(3), alone.features(3), alone.trunk_features()) == (0, 0, 0, 0)
    assert sharded.written() == alone.written()
    assert len(alone.written()) > 36


def test_a_shard_that_cannot_be_is_refused(corpus, tmp_path):
    run = begin_run(config_of(corpus, tmp_path), command="a test")

    def refused(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["shard", str(run.root), *arguments])
        return done.exit_code, done.stderr

    assert refused("03", "0/2")[0] == 3
    assert "index.parquet" in refused("03", "0/2")[1]
    assert "02_folds of run_" in refused("02", "0/2")[1]
    assert "wanted NUMBER/OF" in refused("01", "2/2")[1]


def test_every_stage_that_says_that_it_has_shards_has_work_for_them(corpus, tmp_path):
    config = config_of(corpus, tmp_path)
    assert STAGES_WITH_SHARDS == STAGES_ON_FILES == tuple(stage.name for stage in STAGES if stage.sharded(config))
