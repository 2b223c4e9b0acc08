"""How a run came about, on its page: as recorded, "not recorded" where it is not, and text only."""

import json
from pathlib import Path

import pytest

from fvc_lib.analysis.pages.report import provenance_html
from fvc_lib.services.run_paths import RunPaths

ATTEMPT = {
    "started_utc": "2026-01-02T03:04:05Z",
    "command": "python run_notebooks.py -p corpus '<b>x</b>'",
    "code": {"commit": "a" * 40, "branch": "main", "changed_since_commit": True, "left_out": ["big.py (2.0 MB)"]},
    "versions": {"python": "3.11.7", "python_build": "CPython main", "torch": "2.13.0", "torchvision": None},
    "hardware": {
        "host": "node1", "cores": 8, "omp_num_threads": "4", "memory_bytes": 64 * 10**9,
        "memory_limit_bytes": 8 * 10**9, "memory_limit_from": "SLURM_MEM_PER_NODE", "gpus": ["NVIDIA H200"],
    },
    "slurm": {"job_id": "12", "array_task_id": "3"},
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def write(run: RunPaths, *attempts: object, **more: object) -> str:
    run.run_json.write_text(json.dumps({"attempts": attempts, **more}))
    return provenance_html(run)


def test_code_machine_and_the_commands_that_repeat_it_are_shown(run):
    run.code_patch.write_text("diff")
    html = write(run, ATTEMPT, repeat=["git checkout aaa", "python run_notebooks.py --params '<p>.yaml'"])
    for text in (
        "a" * 40, 'href="code.patch"', "big.py (2.0 MB)", "node1", "<dt>Cores</dt><dd>8</dd>", "NVIDIA H200",
        "64.00 GB, limited to 8.00 GB by SLURM_MEM_PER_NODE", "job id 12, array task id 3", "<dd>3.11.7</dd>",
        "2026-01-02 03:04 UTC", "not installed",
        '<pre id="repeat">git checkout aaa &amp;&amp;\npython run_notebooks.py --params &#39;&lt;p&gt;',
    ):  # fmt: skip
        assert text in html, text
    assert "<b>x" not in html
    assert "attempts</h3>" not in html


def test_the_machine_of_a_submitted_run_is_the_first_job_s(run):
    login = {**ATTEMPT, "submits": True, "slurm": None, "hardware": {"host": "login", "cores": 2, "processor": "Old"}}
    html = write(run, login, ATTEMPT)
    assert "<dt>Cores</dt><dd>8</dd>" in html
    assert "Old" not in html


def test_attempts_tell_what_differs(run):
    second = {**ATTEMPT, "differs": {"torch": ["2.12.0", "2.13.0"]}, "code_differs": {"commit": ["c" * 40, None]}}
    html = write(run, ATTEMPT, second, ATTEMPT)
    assert "<h3>3 attempts</h3>" in html
    assert f"torch: 2.12.0 → 2.13.0; commit: {'c' * 12} → none" in html
    assert html.count("nothing that counts") == 1


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"attempts": 3}', '{"attempts": [3, {"code": 1, "hardware": [], "versions": "x", "slurm": 1}]}',
     '{"attempts": [{}, {"differs": 3}], "repeat": [1, null]}'],
)  # fmt: skip
def test_what_is_not_recorded_is_said_to_be_so(run, content):
    run.run_json.write_text(content)
    assert "not recorded" in provenance_html(run)
