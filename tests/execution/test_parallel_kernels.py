"""Many notebooks at once in one process: each gets its own kernel, parameters and record."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

from tests.execution.conftest import execute_notebook, write_notebook


def test_four_notebooks_at_once_do_not_touch_each_other(tmp_path):
    source = write_notebook(tmp_path / "one.ipynb", ["import os", "print(f'seed {seed} of {run_dir}', os.getpid())"])
    before = threading.active_count()

    def run(number: int) -> tuple[bool, str, int]:
        folder, pids = tmp_path / f"{number}", []
        folder.mkdir()
        parameters = {"seed": number, "run_dir": f"folder {number}"}
        outcome = execute_notebook(source, folder, parameters, on_start=pids.append)
        cells = json.loads((folder / "record.ipynb").read_text())["cells"]
        return outcome.ok, "".join(cells[-1]["outputs"][0]["text"]), pids[0]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, range(4)))
    for number, (ok, text, pid) in enumerate(results):
        assert ok
        assert text == f"seed {number} of folder {number} {pid}\n"
    assert len({pid for _, _, pid in results}) == 4
    assert threading.active_count() == before
