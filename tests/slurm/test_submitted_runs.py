"""Runs in a real Slurm of two nodes: submitted in parts, in one, partly finished, with what ends a job on the way."""

import os
import re
import shlex
import subprocess

import pytest

from fvc_lib.execution.run.status import read_status, status_now
from fvc_lib.execution.slurm import SlurmError, job_states, script_path, submitted_jobs
from fvc_lib.services.errors import UsageError
from tests.slurm.project import log_of, noted, results, told, undisturbed_chain

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def ended_well(cluster, *job_ids):
    def all_ended() -> bool:
        states = {job_id: cluster.state(job_id) for job_id in job_ids}
        bad = {k: v for k, v in states.items() if v not in {"COMPLETED", "PENDING", "RUNNING", "COMPLETING", ""}}
        if bad:
            raise AssertionError(f"{bad}\n{cluster.describe()}")
        return set(states.values()) == {"COMPLETED"}

    cluster.wait_for(all_ended, f"jobs {job_ids} to end well")


def test_a_run_in_parts_ends_as_one_under_plain_bash_its_folds_on_two_nodes_at_once(cluster, project):
    meet = {"meet": True}
    run = project.begin(train_fold_0=meet, train_fold_1=meet)
    site = project.site(cpus=2)  # all of a node
    jobs = project.jobs(run, site)
    first, train, last = project.submit(run, site)
    plain = project.begin(train_fold_0=meet, train_fold_1=meet)
    beside = run_by_bash(jobs, run, plain)
    ended_well(cluster, first.job_id, f"{train.job_id}_0", f"{train.job_id}_1", last.job_id)
    status = read_status(run)
    assert status.state == "done"
    assert {key: stage.state for key, stage in status.stages.items()} == dict.fromkeys(
        ("first", "train_fold_0", "train_fold_1", "last"), "done"
    )
    assert {*noted(run, "train_fold_0", "starts"), *noted(run, "train_fold_1", "starts")} == set(cluster.nodes)
    assert project.left(run) == []
    assert project.submit(run, site) == []
    assert [state.state for state in job_states(run.root)] == ["COMPLETED"] * 4
    assert {state.name for state in job_states(run.root)} == {"first", "train", "last"}

    assert submitted_jobs(run.root) == [first, train, last]
    assert beside.wait(600) == 0
    assert results(plain) == results(run)


def run_by_bash(jobs, run, plain) -> subprocess.Popen[bytes]:
    """The scripts of ``run`` one after another on this machine, for the run ``plain``."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    commands = []
    for number, job in enumerate(jobs):
        copy = plain.root / f"{number}.sh"
        copy.write_text(script_path(job, run.root).read_text().replace(run.run_id, plain.run_id))
        commands.append(f"bash {shlex.quote(str(copy))}")
    return subprocess.Popen(["bash", "-c", " && ".join(commands)], env=own)


def test_what_rests_on_a_failed_fold_names_it_and_ends_and_only_the_rest_is_submitted_again(cluster, project):
    run = project.begin(train_fold_0={"fail": True})
    site = project.site()
    _, train, last = project.submit(run, site)
    with pytest.raises(UsageError, match=rf"scancel .*{last.job_id}"):
        project.submit(run, site)  # two jobs would work on the same
    cluster.wait_for(lambda: cluster.state(last.job_id) == "FAILED", "the last job to begin and end")
    log = log_of(run, last.job_id)
    assert re.search(r"last cannot run yet, and nothing was begun: it needs train_fold_0 \(", log)
    assert "submit the rest once" in log
    assert noted(run, "last", "starts") == []
    assert cluster.state(f"{train.job_id}_0") == "FAILED"
    assert cluster.jobs()[f"{train.job_id}_0"]["ExitCode"] == "1:0"
    ended_well(cluster, f"{train.job_id}_1")
    assert (told(run, "train_fold_0").state, told(run, "train_fold_0").error.name) == ("failed", "ValueError")
    project.order(run)
    again, after = project.submit(run, site)
    assert again.folds == (0,)
    ended_well(cluster, f"{again.job_id}_0", after.job_id)
    assert read_status(run).state == "done"
    assert len(noted(run, "train_fold_1", "starts")) == 1


def test_before_the_time_limit_a_fold_saves_and_requeues_itself_alone_and_ends_as_if_undisturbed(cluster, project):
    run = project.begin(train_fold_1={"steps": 10, "hold": 5})
    _, train, last = project.submit(run, project.site(time="00:30:00", signal_seconds=90))
    undisturbed, stopped = (f"{train.job_id}_{fold}" for fold in range(2))
    cluster.wait_for(lambda: len(noted(run, "train_fold_1", "steps")) >= 5, "the fold to be at work")
    cluster.wait_for(lambda: cluster.state(undisturbed) == "COMPLETED", "the other fold to end")
    # Now its limit is one to two minutes away: Slurm, which looks every half minute, finds that the signal is due.
    hours, minutes, _ = cluster.jobs()[stopped]["RunTime"].split(":")
    cluster.run("scontrol", "update", f"JobId={stopped}", f"TimeLimit={int(hours) * 60 + int(minutes) + 2}")
    cluster.wait_for(lambda: len(noted(run, "train_fold_1", "starts")) == 2, "the fold's second start")
    cluster.run("scontrol", "update", f"JobId={stopped}", "TimeLimit=30")
    cluster.wait_for(lambda: cluster.state(last.job_id) == "COMPLETED", "the last job")
    starts = len(noted(run, "train_fold_1", "starts"))
    assert starts >= 2
    assert len(noted(run, "train_fold_0", "starts")) == 1
    # On a busy machine a signal may come before the second kernel is up: then the job leaves without having begun.
    restarts = int(cluster.jobs()[stopped]["Restarts"])
    assert restarts >= starts - 1
    assert cluster.jobs()[undisturbed]["Restarts"] == "0"
    assert noted(run, "train_fold_1", "steps") == [str(step) for step in range(1, 11)]  # none twice, none left out
    assert log_of(run, stopped).count(f"requeues itself as {stopped}") == restarts
    assert told(run, "train_fold_1").state == "done"
    assert starts <= told(run, "train_fold_1").attempts <= restarts + 1

    assert results(run)["train_fold_1.txt"].split()[0] == undisturbed_chain("train_fold_1", 10)


def test_a_job_that_takes_more_memory_than_it_asked_for_is_told_as_killed_for_memory(cluster, project):
    run = project.begin(train_fold_0={"eat_mib": 3000})
    _, train, last = project.submit(run, project.site(memory=600))
    fold = f"{train.job_id}_0"
    cluster.wait_for(lambda: cluster.state(last.job_id) == "FAILED", "what rests on it to be given up")
    ended_well(cluster, f"{train.job_id}_1")
    assert cluster.jobs()[fold]["Restarts"] == "0"
    assert told(run, "train_fold_1").state == "done"
    stage = status_now(run).stages["train_fold_0"]
    if cluster.limits_memory:  # the system kills the kernel, and the runner lives to tell
        assert (stage.state, stage.exit_code, stage.killed_by) == ("failed", 137, "SIGKILL")
        assert "memory" in stage.reason
        assert cluster.state(fold) in {"OUT_OF_MEMORY", "FAILED"}
    else:  # Slurm, which looks once a second, kills all of the job: its queue tells, and nobody is said to be at work
        assert stage.state == "interrupted"
        (state,) = (state for state in job_states(run.root) if state.job_id == fold)
        assert state.ended
        assert state.state != "COMPLETED"


def test_where_one_job_is_refused_those_before_it_are_cancelled_and_the_site_file_is_named(cluster, project):
    run = project.begin(first={"steps": 3000})
    site = project.site(partition_training="gone")
    with pytest.raises(SlurmError) as refused:
        project.submit(run, site)
    text = str(refused.value)
    assert "invalid partition specified: gone" in text
    assert str(site.path) in text
    first = text.partition("Jobs ")[2].split(",")[0]
    cluster.wait_for(lambda: cluster.state(first) == "CANCELLED", "the first job to be cancelled")
    assert submitted_jobs(run.root) == []
