"""The budget is the smallest limit, and names its origin."""

from pathlib import Path

import pytest

from fvc_lib.services.memory import ALLOC_CONF_NAMES, allocator_environment, memory_budget, memory_sharers


@pytest.fixture
def tree(tmp_path: Path):
    """Return a function that writes control groups into a folder, which stands for the machine's root."""

    def lay(membership: str, **limits: str) -> Path:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(membership)
        for place, text in limits.items():
            file = tmp_path / "sys/fs/cgroup" / place.replace("__", "/").replace("_DOT_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        return tmp_path

    return lay


def budget(root: Path, mem_gb: float | None = None, **environ: str) -> tuple[int, str]:
    found = memory_budget(mem_gb, environ=environ, root=root)
    return found.total_bytes, found.origin


def test_what_was_asked_for_counts_where_it_is_smaller_and_not_where_it_is_larger(tmp_path):
    assert budget(tmp_path, 0.25) == (250_000_000, "mem_gb / FVC_MEM_GB")
    assert budget(tmp_path, 0.25, SLURM_MEM_PER_NODE="100") == (100 << 20, "SLURM_MEM_PER_NODE")
    assert budget(tmp_path, 1e9)[1] == "this machine's memory"


def test_the_environment_has_the_limit_of_a_kernel_and_how_many_share_it(tmp_path):
    assert budget(tmp_path, FVC_MEM_GB="0.25") == (250_000_000, "mem_gb / FVC_MEM_GB")
    assert budget(tmp_path, 0.5, FVC_MEM_GB="0.25")[0] == 500_000_000
    assert budget(tmp_path, FVC_MEM_GB="much")[1] == "this machine's memory"
    shared = {"FVC_MEM_GB": "0.25", "FVC_MEMORY_SHARERS": "5"}
    assert budget(tmp_path, **shared) == (50_000_000, "1/5 of 0.25 GB (mem_gb / FVC_MEM_GB)")
    assert [memory_sharers({"FVC_MEMORY_SHARERS": text}) for text in ("5", "", "-1", "0", "x")] == [5, 1, 1, 1, 1]


def test_slurms_limit_per_cpu_is_times_the_cpus_it_gave(tmp_path):
    per_cpu = {"SLURM_MEM_PER_CPU": "50", "SLURM_CPUS_ON_NODE": "3"}
    assert budget(tmp_path, **per_cpu) == (150 << 20, "SLURM_MEM_PER_CPU x SLURM_CPUS_ON_NODE")
    assert budget(tmp_path, SLURM_MEM_PER_CPU="50")[1] == "this machine's memory"


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/job\n", {"job__memory_DOT_max": "400000000"}, (400_000_000, "control group /job, memory.max")),
        (
            "0::/slurm/job_7/step_0/user\n",
            {"slurm__job_7__memory_DOT_max": "300000000", "slurm__job_7__step_0__user__memory_DOT_max": "max"},
            (300_000_000, "control group /slurm/job_7, memory.max"),
        ),
        (
            "5:cpu,cpuacct:/elsewhere\n4:memory:/slurm/uid_1/job_2\n0::/\n",
            {
                "memory__slurm__uid_1__job_2__memory_DOT_limit_in_bytes": "9223372036854771712",
                "memory__slurm__uid_1__memory_DOT_limit_in_bytes": "200000000",
                "memory__memory_DOT_limit_in_bytes": "9223372036854771712",
            },
            (200_000_000, "control group /slurm/uid_1, memory.limit_in_bytes"),
        ),
    ],
    ids=["version 2", "of an ancestor", "version 1, beside other controllers"],
)
def test_the_limit_of_a_control_group_is_read(tree, membership, limits, expected):
    assert budget(tree(membership, **limits)) == expected


def test_the_allocator_is_set_unless_the_user_has_set_it_under_any_name():
    assert allocator_environment({"PATH": "/bin"}) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ALLOC_CONF_NAMES:
        assert allocator_environment({name: "max_split_size_mb:64"}) == {}
