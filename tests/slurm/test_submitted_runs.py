"""Runs in a real Slurm of two nodes: submitted in parts, in one, partly finished, with what ends a job on the way."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner

from fvc_lib.command_line.commands import status
from fvc_lib.execution.plan.stages import tasks_in_order
from fvc_lib.execution.run.status import read_status, status_now
from fvc_lib.execution.slurm.job_scripts import plan_jobs, script_path
from fvc_lib.execution.slurm.queue import SlurmError, clips_job, job_states, read_accounting, submit, submitted_jobs
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


def starts_running(cluster, run, key, job_id, steps=3):
    """Wait until the task has made some steps."""
    cluster.wait_for(
        lambda: cluster.state(job_id) == "RUNNING" and len(noted(run, key, "steps")) >= steps, f"{key} to be at work"
    )


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
    assert [state.state for state in job_states(run)] == ["COMPLETED"] * 4
    assert {state.task for state in job_states(run)} == {"first", "train_fold_0", "train_fold_1", "last"}

    assert submitted_jobs(run) == [first, train, last]
    assert beside.wait(600) == 0
    assert results(plain) == results(run)


def run_by_bash(jobs, run, plain) -> subprocess.Popen[bytes]:
    """The scripts of ``run`` one after another on this machine, for the run ``plain``."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    commands = []
    for number, job in enumerate(jobs):
        copy = plain.root / f"{number}.sh"
        copy.write_text(script_path(job, run).read_text().replace(run.run_id, plain.run_id))
        commands.append(f"bash {shlex.quote(str(copy))}")
    return subprocess.Popen(["bash", "-c", " && ".join(commands)], env=own)


def test_a_whole_run_is_one_job(cluster, project):
    meet = {"meet": True}
    run = project.begin(train_fold_0=meet, train_fold_1=meet)  # --jobs 2: both folds at once here as well
    (job,) = project.submit(run, project.site(), one_job=True)
    ended_well(cluster, job.job_id)
    assert read_status(run).state == "done"
    assert cluster.jobs()[job.job_id]["NumCPUs"] == "2"


def test_what_rests_on_a_failed_fold_names_it_and_ends_and_only_the_rest_is_submitted_again(cluster, project):
    run = project.begin(train_fold_0={"fail": True})
    site = project.site()
    _, train, last = project.submit(run, site)
    cluster.wait_for(lambda: cluster.state(last.job_id) == "FAILED", "the last job to begin and end")
    log = log_of(run, last.job_id)
    assert re.search(r"last cannot run yet, and nothing was begun: it needs train_fold_0 \(", log)
    assert "submit what is left with --resume RUN --executor slurm" in log
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
    starts_running(cluster, run, "train_fold_1", stopped, steps=5)
    cluster.wait_for(lambda: cluster.state(undisturbed) == "COMPLETED", "the other fold to end")
    # Now its limit is one to two minutes away: Slurm, which looks every half minute, finds that the signal is due.
    hours, minutes, _ = cluster.jobs()[stopped]["RunTime"].split(":")
    cluster.run("scontrol", "update", f"JobId={stopped}", f"TimeLimit={int(hours) * 60 + int(minutes) + 2}")
    cluster.wait_for(lambda: len(noted(run, "train_fold_1", "starts")) == 2, "the fold's second start", seconds=600)
    cluster.run("scontrol", "update", f"JobId={stopped}", "TimeLimit=30")
    cluster.wait_for(lambda: cluster.state(last.job_id) == "COMPLETED", "the last job", seconds=600)
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


def test_a_job_requeues_itself_only_so_often(cluster, project):
    run = project.begin(first={"steps": 3000})
    job, *_, last = project.submit(run, project.site(max_requeues=1))
    for start in (1, 2):
        cluster.wait_for(lambda start=start: len(noted(run, "first", "starts")) == start, "a start")
        starts_running(cluster, run, "first", job.job_id)
        cluster.run("scancel", "--signal=USR1", "--batch", job.job_id)
    cluster.wait_for(lambda: cluster.state(job.job_id) == "FAILED", "the job to give up")
    assert cluster.jobs()[job.job_id]["ExitCode"] == "75:0"
    assert "MAX_REQUEUES is 1" in log_of(run, job.job_id)
    assert told(run, "first").state == "interrupted"
    cluster.wait_for(lambda: cluster.state(last.job_id) == "CANCELLED", "what rests on it to be given up")


def test_a_cancelled_job_saves_and_stays_away_until_it_is_submitted_again(cluster, project):
    run = project.begin(first={"steps": 10, "hold": 5})
    site = project.site()
    job, *_ = project.submit(run, site)
    starts_running(cluster, run, "first", job.job_id)
    with pytest.raises(UsageError, match=f"scancel {job.job_id} "):
        project.submit(run, site)  # two jobs would work on the same
    cluster.run("scancel", job.job_id)
    cluster.wait_for(lambda: told(run, "first").state == "interrupted", "the run to leave")
    cluster.wait_for(lambda: cluster.state(job.job_id) == "CANCELLED", "the job to end")
    assert (told(run, "first").exit_code, read_status(run).state) == (75, "requeue")
    assert "requeues itself" not in log_of(run, job.job_id)
    again = project.submit(run, site)
    ended_well(cluster, again[0].job_id, again[-1].job_id)
    assert noted(run, "first", "steps") == [str(step) for step in range(1, 11)]


def test_a_preempted_job_goes_on_where_it_was_once_there_is_room(cluster, project):
    run = project.begin(first={"steps": 10, "hold": 5})
    job, *_, last = project.submit(run, project.site(partition="scavenge"))
    starts_running(cluster, run, "first", job.job_id)
    urgent = cluster.run("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")
    ended_well(cluster, urgent)
    ended_well(cluster, job.job_id, last.job_id)
    assert len(noted(run, "first", "starts")) == 2
    assert noted(run, "first", "steps") == [str(step) for step in range(1, 11)]


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
        (state,) = (state for state in job_states(run) if state.job_id == fold)
        assert state.ended
        assert state.state != "COMPLETED"


def test_jobs_and_folds_that_survived_a_memory_kill_of_a_worker_are_gone_on_from(cluster, project):
    if not cluster.limits_memory:
        pytest.skip("no control groups that may be written here: Slurm kills all of a job, not a worker alone")
    run = project.begin(first={"lose_a_worker": True}, train_fold_0={"lose_a_worker": True})
    first, train, last = project.submit(run, project.site(memory=700))
    ended_well(cluster, last.job_id)
    killed = [first.job_id, f"{train.job_id}_0"]
    assert [cluster.state(each) for each in killed] == ["OUT_OF_MEMORY"] * 2
    shown = CliRunner().invoke(status, [str(run.root)]).output
    for each in killed:
        assert re.search(
            rf"job {each} .*OUT_OF_MEMORY.*: a process of it was killed for memory, and its work was", shown
        )
    assert "MEMORY_HEADROOM_PERCENT" not in shown
    assert {stage.state for stage in read_status(run).stages.values()} == {"done"}


def test_while_nodes_are_drained_a_job_waits_and_says_why_then_takes_the_one_that_is_back(cluster, project):
    for node in cluster.nodes:
        cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=cleaning")
    run = project.begin()
    job, *_, last = project.submit(run, project.site())

    def reason() -> str:
        return next(state.reason for state in job_states(run) if state.job_id == job.job_id)

    cluster.wait_for(lambda: "DRAINED" in reason() or "NotAvail" in reason(), "a reason that names the nodes")
    waiting = {state.job_id: state for state in job_states(run)}
    assert {waiting[each.job_id].state for each in (job, last)} == {"PENDING"}
    cluster.run("scontrol", "update", f"NodeName={cluster.nodes[1]}", "State=RESUME")
    ended_well(cluster, last.job_id)
    assert {*noted(run, "first", "starts"), *noted(run, "train_fold_0", "starts")} == {cluster.nodes[1]}


def test_where_one_job_is_refused_those_before_it_are_cancelled_and_the_site_file_is_named(cluster, project):
    run = project.begin(first={"steps": 3000})
    site = project.site(partition_training="gone")
    with pytest.raises(SlurmError) as refused:
        project.submit(run, site)
    text = str(refused.value)
    assert "train: sbatch failed" in text
    assert "invalid partition specified: gone" in text
    assert f"The settings are in {site.path}" in text
    first = text.partition("Jobs ")[2].split(",")[0]
    cluster.wait_for(lambda: cluster.state(first) == "CANCELLED", "the first job to be cancelled")
    assert submitted_jobs(run) == []
    assert project.site(python=sys.executable).python == sys.executable


def test_a_queue_that_has_forgotten_a_job_and_a_cluster_without_accounting_are_nothing_special(cluster, project):
    run = project.begin()
    run.slurm.mkdir()
    (run.slurm / "submitted.json").write_text('{"jobs": [{"job_id": "4000000", "name": "x", "stages": ["first"]}]}')
    assert job_states(run) == []
    assert read_accounting(run) == []
    assert not (run.slurm / "accounting.json").exists()


def test_a_run_s_clips_wait_for_another_run_s_that_are_made_just_now(cluster, project):
    """As those of a sweep's members do, which are submitted together."""
    site, runs = project.site(), [project.begin() for _ in range(2)]
    tasks = tasks_in_order(project.config)[:3]  # of the real pipeline, up to the clips
    jobs = plan_jobs(tasks, project.config, site, {})
    submit(jobs, runs[0], site)
    waited_for = clips_job(runs[0])
    (second,) = submit(jobs, runs[1], site, after_clips=[waited_for])
    assert f"Dependency=afterany:{waited_for}(" in cluster.run("scontrol", "show", "job", second.job_id)
    cluster.run("scancel", waited_for, second.job_id)
    cluster.wait_for(lambda: not clips_job(runs[0]), "the job to have ended")
