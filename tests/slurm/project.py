"""A checkout's look-alike with three small stages, whose runs real jobs work on."""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import nbformat

from fvc_lib import CHECKOUT
from fvc_lib.execution.plan import make_plan, read_notebooks
from fvc_lib.execution.run.record import begin_run
from fvc_lib.execution.run.status import StageStatus, read_status
from fvc_lib.execution.slurm import Site, SlurmJob, plan_jobs, read_site, submit
from fvc_lib.execution.stages import Task
from fvc_lib.services.config import RunConfig
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import Stage
from tests.slurm.driver import stages_of

STAGES = [
    {"name": "first", "needs": [], "folds": 0},
    {"name": "train", "needs": ["first"], "folds": 2},
    {"name": "last", "needs": ["train"], "folds": 0},
]
BEGIN = """
import hashlib, json, os, signal, subprocess, sys, time
from pathlib import Path
from fvc_lib.services.errors import StoppedError

run = Path(run_dir)
me = stage if fold is None else f"{stage}_fold_{fold}"
orders = json.loads((run / "orders.json").read_text()).get(me, {})
tables = run / "tables"
tables.mkdir(exist_ok=True)
def note(kind, text=""):
    with (run / f"{me}.{kind}").open("a") as stream:
        stream.write(f"{text}\\n")
note("starts", os.environ.get("SLURMD_NODENAME"))
"""
MEET = """
if orders.get("meet") and "SLURM_JOB_ID" in os.environ:  # each fold waits for the other: they run at once, or never
    end = time.monotonic() + 1200
    while not all((run / f"train_fold_{each}.starts").exists() for each in range(2)):
        assert time.monotonic() < end, "the other fold did not run beside this one"
        time.sleep(0.05)
"""
ORDERS = """
if orders.get("fail"):
    raise ValueError("as ordered")
hoard = []
for _ in range(orders.get("eat_mib", 0)):
    hoard.append(bytearray(os.urandom(1) * (1 << 20)))
"""
STEPS = """
stop = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: stop.append(number))
saved = run / "checkpoints" / f"{me}.json"
saved.parent.mkdir(exist_ok=True)
step, chain = json.loads(saved.read_text()) if saved.exists() else (0, "")
while step < orders.get("steps", 2):
    step += 1
    chain = hashlib.sha256(f"{chain} {me} {step}".encode()).hexdigest()
    note("steps", step)
    time.sleep(0.1)
    while step == orders.get("hold") and not stop and not saved.exists():  # only before anything was saved
        time.sleep(0.02)
    if stop:
        saved.write_text(json.dumps([step, chain]))
        raise StoppedError(f"saved after step {step}")
"""
END = """
read = "".join(path.read_text() for path in sorted(tables.glob("train_fold_*.txt")) if stage == "last")
(tables / f"{me}.txt").write_text(f"{chain} {hashlib.sha256(read.encode()).hexdigest()}\\n")
"""


@dataclass(frozen=True)
class Project:
    """A folder with ``run_notebooks.py``, ``slurm/`` and ``notebooks/``, and a runs folder beside."""

    home: Path
    config: RunConfig

    @property
    def stages(self) -> tuple[Stage, ...]:
        return stages_of(self.home)

    def begin(self, **orders: dict[str, object]) -> RunPaths:
        """A new run whose tasks do as ordered: ``steps`` (of 0.1 s), ``hold`` (at that step, until the first
        signal comes), ``fail``, ``eat_mib``, ``meet``.
        """
        run = begin_run(self.config, command="a test")
        self.order(run, **orders)
        return run

    def order(self, run: RunPaths, **orders: dict[str, object]) -> None:
        (run.root / "orders.json").write_text(json.dumps(orders))

    def site(self, **settings: object) -> Site:
        """A site file of these settings: one processor a process, half a minute for nothing."""
        path = self.home / "site.conf"
        values = {"CPUS": 1, "TIME": "00:05:00", "SIGNAL_SECONDS": 30, "MEMORY": 900, **settings}
        path.write_text("".join(f"{name.upper()}='{value}'\n" for name, value in values.items()))
        return read_site(path)

    def left(self, run: RunPaths) -> list[Task]:
        """The tasks that still have to run."""
        notebooks = read_notebooks(self.home / "notebooks", self.stages)
        return [each.task for each in make_plan(notebooks, self.config, run, stages=self.stages) if each.run]

    def jobs(self, run: RunPaths, site: Site) -> list[SlurmJob]:
        return plan_jobs(self.left(run), self.config, site, stages=self.stages)

    def submit(self, run: RunPaths, site: Site) -> list[SlurmJob]:
        return submit(self.jobs(run, site), run.root, site, home=self.home)


def build_project(folder: Path, **values: object) -> Project:
    """A project in ``folder``; ``values`` are parameters of its runs."""
    home = folder / 'it\'s a "check out"'
    (home / "notebooks").mkdir(parents=True)
    (home / "slurm").symlink_to(CHECKOUT / "slurm")
    shutil.copy(Path(__file__).with_name("driver.py"), home / "run_notebooks.py")
    (home / "stages.json").write_text(json.dumps(STAGES))
    for stage in STAGES:
        fold = "fold: int = 0\n" if stage["folds"] else ""
        setting = f"stage = {stage['name']!r}\n" + ("" if fold else "fold = None\n")
        sources = [setting + BEGIN, MEET, ORDERS, STEPS, END]
        cells = [nbformat.v4.new_code_cell(f'run_dir: str = ""\n{fold}', metadata={"tags": ["parameters"]})]
        cells += [nbformat.v4.new_code_cell(source) for source in sources]
        notebook = nbformat.v4.new_notebook(cells=cells)
        (home / "notebooks" / f"{stage['name']}.ipynb").write_text(nbformat.writes(notebook))
    config = resolve_config({"runs_dir": str(folder / "50% of runs"), "num_folds": 2, **values}, environ={})
    return Project(home, config)


def noted(run: RunPaths, key: str, kind: str) -> list[str]:
    """What a task noted: ``starts`` (the node of each start) or ``steps`` (their numbers, as they were made)."""
    path = run.root / f"{key}.{kind}"
    return path.read_text().split() if path.exists() else []


def results(run: RunPaths) -> dict[str, str]:
    """What the run's tasks wrote, by file name."""
    return {path.name: path.read_text() for path in sorted(run.tables.glob("*.txt"))}


def undisturbed_chain(key: str, steps: int) -> str:
    """What a task has after so many steps, each of which hashes the one before."""
    chain = ""
    for step in range(1, steps + 1):
        chain = hashlib.sha256(f"{chain} {key} {step}".encode()).hexdigest()
    return chain


def told(run: RunPaths, key: str) -> StageStatus:
    """What ``status.json`` says of a task."""
    return read_status(run).stages[key]


def log_of(run: RunPaths, job_id: str) -> str:
    """What the job ``12``, or the array task ``12_1``, wrote into its log."""
    (path,) = run.slurm.glob(f"*.{job_id}.out")
    return path.read_text()
