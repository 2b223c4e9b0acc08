"""What a kernel finds in its environment before it imports anything."""

from pathlib import Path

import pytest

NAMES = ("OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO")
CELL = f"import os\noutput('one', ' '.join(os.environ.get(name, '-') for name in {NAMES}))"


def test_when_memory_ends_the_system_takes_a_kernel_before_its_runner(make_project):
    own = Path("/proc/self/oom_score_adj")
    if not own.is_file():
        pytest.skip("not Linux")
    project = make_project(
        one=["from pathlib import Path\noutput('one', Path('/proc/self/oom_score_adj').read_text())"]
    )
    run = project.begin()
    code, _, _ = project.execute(run)
    assert code == 0
    assert int((run.tables / "one.txt").read_text()) == max(500, int(own.read_text()))
