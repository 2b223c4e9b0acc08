from fvc_lib.execution.slurm import Site, jobs_of_files, plan_jobs, render, sbatch_command
from fvc_lib.execution.stages import tasks_in_order
from fvc_lib.services.config import RunConfig
from fvc_lib.services.tasks import STAGES, Stage

CONFIG = RunConfig(num_folds=3)
SITE = Site(memory=1000)


def all_tasks(config: RunConfig = CONFIG, stages=STAGES):
    return tasks_in_order(config, stages)


def stage(name: str, *needs: str, per_fold: bool = False) -> Stage:
    return Stage(name, needs, lambda run, _: (), lambda run, _: (), per_fold, trains=per_fold)


def test_the_pipeline_is_a_job_an_array_and_a_job_each_after_the_one_before():
    before, folds, after = plan_jobs(all_tasks(), CONFIG, SITE)
    assert before.stages == ("01_data_index", "02_folds", "03_augmentation", "03b_forensic_features")
    assert (before.folds, before.needs) == (None, ())
    assert (folds.name, folds.folds, folds.needs) == ("04_fold_training", (0, 1, 2), (before.name,))
    assert after.stages == ("05_kfold_results", "06_analysis_dashboard", "07_memory_report")
    assert (after.needs, after.after) == ((before.name,), (folds.name,))


def test_stages_on_files_have_an_array_of_shards_before_them_whose_end_is_waited_for_well_or_not(tmp_path):
    config = CONFIG.model_copy(update={"corpus": "videos", "forensic_features": True, "model": "frame_cnn"})
    site = Site(shard_tasks=3, memory=700, signal_seconds=60)
    probe, index, decode, measure, clips, folds, _ = plan_jobs(all_tasks(config), config, site)
    assert [(job.name, job.folds, job.shards, job.memory_mib) for job in (probe, decode, measure)] == [
        (f"{name}_shards", (0, 1, 2), 3, 700) for name in ("01_data_index", "03_augmentation", "03b_forensic_features")
    ]
    assert (index.stages, index.needs, index.after) == (("01_data_index", "02_folds"), (), (probe.name,))
    assert (decode.needs, measure.needs) == ((index.name,), (index.name,))
    assert (clips.stages, clips.needs) == (("03_augmentation", "03b_forensic_features"), (index.name,))
    assert clips.after == (decode.name, measure.name)
    assert folds.needs == (index.name, clips.name)
    ids = {job.name: str(number) for number, job in enumerate((probe, index, decode, measure, clips))}
    assert "--dependency=afterok:1,afterany:2:3" in sbatch_command(clips, tmp_path, ids)
    text = render(decode, tmp_path, site)
    assert "#SBATCH --array=0,1,2\n" in text
    assert f'/shards.sh 3 "$*" shard {tmp_path} 03_augmentation\n' in text
    left = [task for task in all_tasks(config) if task.stage.name == "03_augmentation"]
    assert [job.name for job in plan_jobs(left, config, site)] == [decode.name, "03_augmentation"]


def test_a_command_about_files_is_an_array_of_shards_and_a_job_after_it_however_that_ends(tmp_path):
    of_files, command = stage("30_verdicts"), ("predict", "/runs/my run", "/out/asked.csv", "--out", "/out")

    def jobs_of(num_files: int):
        return jobs_of_files(of_files, CONFIG, SITE, num_files=num_files, command=command)

    array, last = jobs_of(5)
    assert (array.shards, array.folds, last.needs, last.after) == (5, (0, 1, 2, 3, 4), (), (array.name,))
    assert array.memory_mib == last.memory_mib == 1000
    assert "/shards.sh 5 \"$*\" predict '/runs/my run' /out/asked.csv --out /out --shard\n" in render(
        array, tmp_path, SITE
    )
    assert "/command.sh predict '/runs/my run' /out/asked.csv --out /out\n" in render(last, tmp_path, SITE)
    assert "--dependency=afterany:7" in sbatch_command(last, tmp_path, {array.name: "7"})
    assert [job.shards for job in jobs_of(1000)] == [8, 0]
    assert [job.shards for job in jobs_of(1)] == [0]


def test_of_a_partly_finished_run_only_what_is_left_is_planned():
    left = [task for task in all_tasks() if task.stage.name >= "04" and task.fold != 1]
    folds, after = plan_jobs(left, CONFIG, SITE)
    assert (folds.folds, folds.needs) == ((0, 2), ())
    assert (after.needs, after.after) == ((), ("04_fold_training",))
    assert plan_jobs([], CONFIG, SITE) == []


def test_any_graph_becomes_jobs_in_an_order_that_keeps_every_need():
    stages = (
        stage("a"),
        stage("b", "a", per_fold=True),
        stage("c", "a"),
        stage("d", "b", per_fold=True),
        stage("e", "c"),
        stage("f", "d", "e"),
        stage("g", "a", per_fold=True),
        stage("h", "g", "b"),
    )
    jobs = plan_jobs(all_tasks(stages=stages), CONFIG, SITE, stages=stages)
    names = [job.name for job in jobs]
    assert sorted(name for job in jobs for name in job.stages) == list("abcdefgh")
    position = {name: number for number, job in enumerate(jobs) for name in job.stages}
    for each in stages:
        for need in each.needs:
            at, before = position[each.name], position[need]
            assert before <= at
            if before == at:
                assert jobs[at].stages.index(need) < jobs[at].stages.index(each.name)
            else:
                assert jobs[before].name in (jobs[at].after if jobs[before].folds else jobs[at].needs)
    for number, job in enumerate(jobs):
        assert {names.index(need) for need in (*job.needs, *job.after)} <= set(range(number))
    assert ("a", "c", "e") in [job.stages for job in jobs]
    assert {job.stages for job in jobs if job.folds} == {("b",), ("d",), ("g",)}
