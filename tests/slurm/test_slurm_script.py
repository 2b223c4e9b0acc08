import subprocess
from pathlib import Path

import pytest

from fvc_lib.execution.slurm import Site, describe, plan_jobs, render, sbatch_quoted
from fvc_lib.execution.stages import tasks_in_order
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError

CONFIG = RunConfig(num_folds=3)
RUN = Path('/data/it\'s a "run" of 50%/run_1')
SITE = Site(account="lab", partition="cpu", partition_training="gpu", gpus=2, extra=("--mail-user=x y",))


def rendered(site: Site = SITE, config: RunConfig = CONFIG) -> list[str]:
    return [render(job, RUN, site) for job in plan_jobs(tasks_in_order(config), config, site)]


def options(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {line.partition("=")[0]: line.partition("=")[2] for line in lines}


def test_every_script_is_bash_with_the_settings_of_the_site_and_gpus_where_something_trains():
    scripts = rendered()
    for text in scripts:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        given = options(text)
        assert (given["account"], given["time"], given["signal"]) == ("lab", "04:00:00", "B:USR1@180")
        assert (given["open-mode"], given["nodes"], given["mem"]) == ("append", "1", "4096M")
        assert "requeue" in given
        assert '#SBATCH "--mail-user=x y"' in text
    before, folds, _ = map(options, scripts)
    assert (before["partition"], before.get("gres")) == ("cpu", None)
    assert (folds["partition"], folds["gres"]) == ("gpu", "gpu:2")
    assert 'a \\"run\\" of 50%%/run_1/slurm/04_fold_training.%A_%a.out"' in folds["output"]
    assert not {"account", "partition", "gres"} & set(options(rendered(Site())[1]))


def test_ranks_are_tasks_spread_over_as_many_nodes_as_they_need():
    given = options(rendered(Site(), RunConfig(num_folds=3, num_ranks=4))[1])
    assert (given["nodes"], given["ntasks"]) == ("1", "4")
    site, config = Site(ranks_per_node=2, gpus=1, memory=1000), RunConfig(num_folds=3, num_ranks=5)
    given = options(rendered(site, config)[1])
    assert (given["nodes"], given["ntasks"], given["ntasks-per-node"], given["gres"]) == ("3", "5", "2", "gpu:2")
    assert given["mem"] == "2000M"


@pytest.mark.parametrize("name", ["a\nb", "a\\b"])
def test_a_name_that_a_batch_script_cannot_hold_is_refused(name):
    job, *_ = plan_jobs(tasks_in_order(CONFIG), CONFIG, SITE)
    with pytest.raises(UsageError):
        render(job, Path(f"/{name}/run_1"), SITE)
    with pytest.raises(UsageError):
        sbatch_quoted("--comment=a\n#SBATCH --uid=0")


def test_a_dry_run_shows_scripts_and_commands_and_writes_nothing(tmp_path):
    run = tmp_path / "run_1"
    shown = describe(plan_jobs(tasks_in_order(CONFIG), CONFIG, SITE), run, SITE)
    assert shown.count("#!/usr/bin/env bash") == 3
    assert "--dependency=afterok:<id of 01_data_index_to_03b_forensic_features> --kill-on-invalid-dep=yes" in shown
    assert list(tmp_path.iterdir()) == []
