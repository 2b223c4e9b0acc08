"""A run that was killed or stopped goes on and ends as one that was not."""

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import polars as pl
import psutil
import pytest

from tests.golden.golden_runs import DEMO, ROOT, differences, facts_of_run, run, run_folder, start
from tests.slurm.conftest import cluster, started_cluster  # noqa: F401  (fixtures)

pytestmark = pytest.mark.long
MEDIA = ROOT.parent / "shared" / "media"
ARGUMENTS = (*DEMO, "-p", "epochs", "2", "-p", "checkpoint_minutes", "0", "--jobs", "1")


def stop_when(folder: Path, arguments: tuple[str, ...], is_time: Callable[[], bool], number: int) -> int:
    """Start a command, signal it once ``is_time`` (SIGKILL: its children too), and return its exit code."""
    process = start(folder, *arguments)
    while not is_time():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True) if number == signal.SIGKILL else []
    for each in [psutil.Process(process.pid), *children]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(number)
    process.communicate(timeout=600)
    return process.returncode


def results_of(facts: Mapping[str, object]) -> dict[str, object]:
    """Return tables and weights alone: steps after the last checkpoint are logged once more when they are repeated."""
    return {name: value for name, value in facts.items() if not name.startswith("metrics")}


@pytest.fixture(scope="module")
def undisturbed(golden_folder: Path) -> dict[str, object]:
    code, shown = run(golden_folder, *ARGUMENTS, "--experiment", "undisturbed")
    assert code == 0, shown
    return facts_of_run(run_folder(golden_folder, "undisturbed"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_a_training_that_was_stopped_goes_on_and_ends_equal(golden_folder, undisturbed, number, code):
    experiment = f"stopped_{number}"
    runs = golden_folder / "runs" / experiment

    def is_training() -> bool:
        return any(runs.glob("run_*/checkpoints/fold_1/latest_checkpoint.pt"))

    found = stop_when(golden_folder, (*ARGUMENTS, "--experiment", experiment), is_training, number)
    assert found in {code, 75}
    found, shown = run(golden_folder, "--resume", str(run_folder(golden_folder, experiment)), "--jobs", "1")
    assert found == 0, shown
    facts = facts_of_run(run_folder(golden_folder, experiment))
    assert differences(results_of(facts), results_of(undisturbed), exact=True) == []


@pytest.mark.skipif(not MEDIA.is_dir(), reason="needs the development media")
def test_a_predict_that_was_killed_goes_on_and_ends_equal(golden_folder, golden_run, tmp_path):
    files = [str(path) for path in sorted((MEDIA / "labelled").rglob("*.mp4"))[:8]]
    for name in ("whole", "killed"):
        arguments = (
            "predict",
            str(golden_run("demo")),
            *files,
            "--out",
            str(tmp_path / name),
            "--pages",
            "0",
            "-j",
            "1",
        )
        if name == "killed":
            journal = tmp_path / name / "findings.jsonl"

            def is_time(journal: Path = journal) -> bool:
                return journal.is_file() and journal.stat().st_size > 0

            assert stop_when(golden_folder, arguments, is_time, signal.SIGKILL) == -9
        code, shown = run(golden_folder, *arguments)
        assert code == 0, shown
    whole, killed = (pl.read_csv(tmp_path / name / "verdicts.csv") for name in ("whole", "killed"))
    assert killed.equals(whole)


@pytest.mark.slurm
def test_a_job_that_was_requeued_in_its_training_ends_equal(cluster, golden_folder, undisturbed):  # noqa: F811
    site, experiment = golden_folder / "site.conf", "jobs"
    site.write_text("CPUS=1\nTIME=00:20:00\nSIGNAL_SECONDS=60\nSHARD_TASKS=1\nMEMORY=2000\n")
    asked = (*ARGUMENTS[:-2], "--experiment", experiment, "--executor", "slurm")
    code, shown = run(golden_folder, *asked, FVC_SITE=str(site))
    assert code == 0, shown
    made = run_folder(golden_folder, experiment)
    cluster.wait_for(lambda: any(made.glob("checkpoints/fold_*/latest_checkpoint.pt")), "a training")
    for job in cluster.run("squeue", "-h", "-t", "RUNNING", "-o", "%i").split():
        cluster.run("scontrol", "requeue", job)
    cluster.wait_for(
        lambda: (made / "report.html").is_file() and not cluster.run("squeue", "-h"), "the end", seconds=600
    )
    facts, wanted = facts_of_run(made), results_of(undisturbed)
    assert differences(results_of(facts), wanted, exact=True) == []
