"""A real cluster for the tests of this folder, started when the first of them asks and ended whatever happens."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import PACKAGES, Cluster, ClusterError, missing_programs
from tests.slurm.project import Project, build_project

NOT_PERMITTED = ("Operation not permitted", "Permission denied", "Read-only file system")


@pytest.fixture(scope="session")
def started_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if missing := missing_programs():
        pytest.skip(f"Slurm is not installed here: no {', '.join(missing)}. {PACKAGES}")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        try:
            cluster.start()
        except ClusterError as error:
            if any(reason in str(error) for reason in NOT_PERMITTED):
                pytest.skip(f"Slurm may not be started here: {error}")
            raise
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(started_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, which this process's own SLURM commands find, too; left empty and whole."""
    for name, value in started_cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield started_cluster
    for node in started_cluster.nodes:
        if "DRAIN" in started_cluster.run("sinfo", "-hN", "-n", node, "-o", "%T").upper():
            started_cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    for state in ("PENDING", "RUNNING"):
        started_cluster.run("scancel", f"--state={state}", *(["--full", "--signal=KILL"] if state == "RUNNING" else []))
    started_cluster.wait_for(lambda: not started_cluster.run("squeue", "-h"), "an empty queue")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return build_project(tmp_path)
