"""A whole run on a real Slurm of two nodes, from index to verdicts, with all that a cluster does to it on the way.

``make cluster-kills CLIPS=2000``. Shards are killed at random moments, alone and with their jobs, one by the system
for memory; in training one node goes down, and one rank is killed for memory. What FVC says a user should submit again
is submitted again. In the end every table, clip, network, score and verdict is what an undisturbed run on the same
cluster has, to the bit. A smaller run has a frozen trunk, whose shards are killed while they compute its features.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
import psutil
import pytest

from fvc_lib import CHECKOUT
from fvc_lib.execution.run.status import read_status, status_now
from fvc_lib.execution.slurm.queue import submitted_jobs
from fvc_lib.services.run_paths import RunPaths, list_runs
from tests.faults.small_runs import metrics_of, results_of
from tests.faults.stage_moments import Point, watching
from tests.kits.many_clips import write_clips
from tests.slurm.cluster import Cluster

CLIPS = int(os.environ.get("FVC_CLUSTER_CLIPS", "60"))
SEED = int(os.environ.get("FVC_KILLS_SEED", "0"))
NUM_KILLS = 6  # of each stage with shards
NUM_NEW = 6  # clips that the finished run judges
# A rank computes with one thread, and frames are few and small: the kills are the point.
VALUES = {
    "model": "frame_cnn", "num_folds": 2, "num_ranks": 2, "fixed_size": 48, "num_frames": 4, "epochs": 3,
    "early_stopping_epochs": 0, "augmentations_per_video": 1, "bootstrap_replicates": 200, "device": "cpu",
    "shuffled_label_control": False, "checkpoint_minutes": 0.1,
}  # fmt: skip
FROZEN = {**VALUES, "model": "efficientnet_lite0", "tune": "head", "num_ranks": 1}
FROZEN_CLIPS = min(CLIPS, 60)  # features take as long whatever becomes of them
SITE = "CPUS=1\nTIME=00:55:00\nSIGNAL_SECONDS=60\nSHARD_TASKS=4\nRANKS_PER_NODE=1\nMEMORY_LEAST=1500\n"
SHARDED = ("01_data_index", "03_augmentation")
OF_FEATURES = "04_fold_training"
MOST_SUBMISSIONS = 6
PATIENCE_SECONDS = 5400
pytestmark = pytest.mark.long


@dataclass
class Machine:
    """A folder with runs and a cache of its own, whose one run is submitted from it."""

    folder: Path
    manifest: Path
    values: Mapping[str, object]
    variables: dict[str, str] = field(default_factory=dict)  # of the environment of its jobs, too
    events: list[tuple[float, str]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def call(self, *arguments: str) -> str:
        """What ``run_notebooks.py`` showed; it ended well."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / "site.conf").write_text(SITE)
        names = {"FVC_RUNS_DIR": "runs", "FVC_CACHE_DIR": "cache", "FVC_SITE": "site.conf"}
        done = subprocess.run(
            [sys.executable, str(CHECKOUT / "run_notebooks.py"), *arguments],
            cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
            env={**os.environ, **self.variables, **{name: str(self.folder / value) for name, value in names.items()}},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def submit(self) -> RunPaths:
        """The run, or what is left of it."""
        values = {"corpus": str(self.manifest), **self.values}
        new = [word for name, value in values.items() for word in ("-p", name, str(value))]
        begun = list_runs(self.folder / "runs")
        self.call(*(["--resume", "latest"] if begun else new), "--executor", "slurm")
        (run,) = list_runs(self.folder / "runs")
        self.note(f"submitted: jobs {', '.join(job.job_id for job in submitted_jobs(run))}")
        return run

    def verdicts(self, run: RunPaths, files: Path) -> pl.DataFrame:
        """Of new files."""
        out = self.folder / "verdicts"
        self.call(
            "predict", str(run.root), str(files), "--out", str(out), "--pages", "0", "--map-minutes", "0", "-j", "1"
        )
        return pl.read_csv(out / "verdicts.csv").sort("path")

    def note(self, what: str) -> None:
        """An event, which is printed."""
        self.events.append((time.monotonic() - self.began, what))
        print(f"  {self.events[-1][0]:7.1f} s  {what}", flush=True)


def wait(cluster: Cluster, condition: Callable[[], object], what: str) -> None:
    cluster.wait_for(condition, what, seconds=PATIENCE_SECONDS)


def work_to_the_end(cluster: Cluster, machine: Machine, run: RunPaths) -> int:
    """Submit what is left until nothing is; how often that was."""
    for again in range(MOST_SUBMISSIONS):
        wait(cluster, lambda: not cluster.run("squeue", "-h"), "an empty queue")
        if read_status(run).state == "done":
            return again
        said = {key: f"{stage.state}: {stage.reason}" for key, stage in status_now(run).stages.items()}
        machine.note(f"not finished: { ({k: v for k, v in said.items() if not v.startswith('done')}) }")
        machine.submit()
    raise AssertionError(f"not finished after {MOST_SUBMISSIONS} submissions\n{logs_of(run)}\n{cluster.describe()}")


def logs_of(run: RunPaths) -> str:
    return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(run.slurm.glob("*.out")))


def running(cluster: Cluster, *words: str) -> list[psutil.Process]:
    """Python processes of jobs, on any node, whose command lines have all of ``words``."""
    found = []
    for node in cluster.nodes:
        for process in cluster.processes_on(node):
            with suppress(psutil.Error):
                command = process.cmdline()
                if "python" in process.name() and all(word in command for word in words):
                    found.append(process)
    return found


def job_of(process: psutil.Process) -> str:
    return process.environ()["SLURM_JOB_ID"]


def kill_shards(cluster: Cluster, machine: Machine, run: RunPaths, stage: str, chance: random.Random) -> None:
    """Kill shards of ``stage`` at random moments, as long as there are any: alone, or with all of their job."""
    wait(cluster, lambda: running(cluster, "shard", stage), f"shards of {stage}")
    for number in range(NUM_KILLS):
        time.sleep(chance.uniform(0.2, 2.5))  # any moment must do
        victims = running(cluster, "shard", stage)
        if not victims:
            return
        victim = chance.choice(victims)
        with suppress(psutil.Error):
            job, name = job_of(victim), victim.cmdline()[-1]
            if number % 3 == 2:
                cluster.run("scancel", "--signal=KILL", "--full", job)
                machine.note(f"{stage}, shard {name}: job {job} killed with all its processes")
            else:
                victim.kill()
                machine.note(f"{stage}, shard {name}: process {victim.pid} of job {job} killed with SIGKILL")


def take_memory(cluster: Cluster, machine: Machine, victim: psutil.Process, what: str) -> bool:
    """Have the system kill in the step of ``victim`` for memory; whether it did."""
    killed = cluster.run_out_of_memory(victim)
    if killed:
        machine.note(f"{what}: the system killed in its control group for memory")
    return killed


def ranks_at_work(cluster: Cluster, run: RunPaths) -> list[psutil.Process]:
    """Where a training has saved something that it can go on from, and is not at its end."""
    return [
        process
        for process in running(cluster, "fvc_lib.tasks.rank", str(run.root))
        if "--fold" in (command := process.cmdline())
        and any(run.fold_checkpoints(int(command[command.index("--fold") + 1])).glob("**/*.pt"))
    ]


def lose_a_node(cluster: Cluster, machine: Machine, run: RunPaths) -> None:
    """The second: it closes no connection; later it is back, and nothing on it any more."""
    node = cluster.nodes[1]
    wait(cluster, lambda: ranks_at_work(cluster, run), "a training at work on two nodes")
    lost = cluster.processes_on(node)
    for process in lost:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    frozen = time.monotonic()
    machine.note(f"node {node} lost, with {len(lost)} processes")
    wait(cluster, lambda: _lost(run), "the loss to be noticed")
    machine.note(f"RankLostError of {', '.join(_lost(run))} {time.monotonic() - frozen:.0f} s after the node was lost")
    for process in lost:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    cluster.boot(node)
    machine.note(f"node {node} is back")


def _lost(run: RunPaths) -> list[str]:
    stages = read_status(run).stages.items()
    return [key for key, stage in stages if stage.error is not None and stage.error.name == "RankLostError"]


def kill_a_rank_for_memory(cluster: Cluster, machine: Machine, run: RunPaths) -> None:
    """On the second node, in a training that is at work."""

    def tried() -> bool:
        ranks = ranks_at_work(cluster, run)
        return not ranks or take_memory(cluster, machine, ranks[-1], f"rank of job {job_of(ranks[-1])}")

    wait(cluster, lambda: ranks_at_work(cluster, run), "a training at work again")
    wait(cluster, tried, "a rank killed for memory")


def disturb(cluster: Cluster, machine: Machine, run: RunPaths) -> Iterator[None]:
    """All that happens, one after the other; after each the run may be told to go on."""
    chance = random.Random(SEED)
    for stage in SHARDED:
        if stage == SHARDED[-1] and cluster.limits_memory:
            wait(cluster, lambda: running(cluster, "shard", SHARDED[-1]), "shards of clips")
            victims = running(cluster, "shard", SHARDED[-1])
            take_memory(cluster, machine, victims[0], f"{SHARDED[-1]}, shard {victims[0].cmdline()[-1]}")
        kill_shards(cluster, machine, run, stage, chance)
        yield
    lose_a_node(cluster, machine, run)
    yield
    if cluster.limits_memory:
        kill_a_rank_for_memory(cluster, machine, run)
        yield


def hold_a_shard(machine: Machine) -> None:
    """The first shard that is about to write its third clip's features waits to be killed."""
    third = Point("os.rename", r"/features_\w+/../[^/]+\.npy$", times=3)
    machine.folder.mkdir()
    machine.variables.update(watching(machine.folder, (third,), f"hold {machine.folder / 'mark'}"))


def disturb_features(cluster: Cluster, machine: Machine, run: RunPaths) -> Iterator[None]:
    """The shard that waits is killed, with those that are at work beside it; then some at random moments."""
    wait(cluster, (machine.folder / "mark").exists, "features")
    computed = len(features_of(machine))
    for victim in running(cluster, "shard", OF_FEATURES):
        with suppress(psutil.Error):
            victim.kill()
            machine.note(f"{OF_FEATURES}: process {victim.pid} killed when {computed} clips had features")
    kill_shards(cluster, machine, run, OF_FEATURES, random.Random(SEED))
    yield


def features_of(machine: Machine) -> dict[str, bytes]:
    """What a frozen trunk says of clips."""
    found = sorted((machine.folder / "cache" / "clips").glob("*/features_*/*/[!.]*.npy"))
    return {str(path.relative_to(machine.folder)): path.read_bytes() for path in found}


def clips_of(machine: Machine, run: RunPaths) -> dict[str, bytes]:
    names = pl.read_csv(run.augmented_metadata)["clip_path"].to_list()
    return {name: (machine.folder / "cache" / name).read_bytes() for name in names}


Disturb = Callable[[Cluster, Machine, RunPaths], Iterator[None]]


def compare(
    cluster: Cluster,
    folder: Path,
    num_clips: int,
    values: Mapping[str, object],
    disturb: Disturb,
    prepare: Callable[[Machine], None] = lambda _machine: None,
) -> int:
    """Of how many clips both runs have features of a frozen trunk; all that they have is equal."""
    manifest = write_clips(folder / "corpus", num_clips)
    new = write_clips(folder / "new", NUM_NEW, first_group=num_clips).parent / "videos"
    whole, killed = (Machine(folder / name, manifest, values) for name in ("undisturbed", "disturbed"))
    print(f"\n{num_clips} clips, {values['model']}, seed {SEED}. Undisturbed:")
    whole_run = whole.submit()
    assert work_to_the_end(cluster, whole, whole_run) == 0, logs_of(whole_run)
    whole.note("finished")

    print("Disturbed:")
    prepare(killed)
    killed.began = time.monotonic()
    run = killed.submit()
    for _ in disturb(cluster, killed, run):
        assert list_runs(killed.folder / "runs") == [run]
    submissions = 1 + work_to_the_end(cluster, killed, run)
    killed.note("finished")

    found, wanted = results_of(run), results_of(whole_run)
    assert found.keys() == wanted.keys()
    assert [name for name, content in wanted.items() if found[name] != content] == []
    assert metrics_of(run) == metrics_of(whole_run)
    clips = clips_of(killed, run)
    assert clips == clips_of(whole, whole_run)
    features = features_of(killed)
    assert features == features_of(whole)
    ours, theirs = (machine.verdicts(each, new) for machine, each in ((killed, run), (whole, whole_run)))
    same = [name for name in theirs.columns if name not in {"model_id"}]
    assert ours.select(same).equals(theirs.select(same))
    assert ours.height == NUM_NEW

    print(f"\n{'stage':28} {'undisturbed s':>14} {'disturbed s':>12} {'attempts':>9}")
    one, two = read_status(whole_run).stages, read_status(run).stages
    for key, stage in one.items():
        seconds = [each.duration_seconds or 0 for each in (stage, two[key])]
        print(f"{key:28} {seconds[0]:14.1f} {seconds[1]:12.1f} {two[key].attempts:9}")
    print(
        f"submitted {submissions} times. Equal to the bit: {len(wanted)} tables and networks, {len(clips)} clips, "
        f"{len(metrics_of(run))} metrics, features of {len(features)} clips, {ours.height} verdicts."
    )
    return len(features)


def test_a_whole_run_on_two_nodes_ends_as_one_that_nothing_happened_to(cluster, tmp_path):
    assert compare(cluster, tmp_path, CLIPS, VALUES, disturb) == 0


def test_a_run_with_a_frozen_trunk_ends_so_too_where_shards_die_computing_its_features(cluster, tmp_path):
    clips = FROZEN_CLIPS * (1 + FROZEN["augmentations_per_video"])
    assert compare(cluster, tmp_path, FROZEN_CLIPS, FROZEN, disturb_features, hold_a_shard) == clips
