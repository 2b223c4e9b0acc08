"""What of a cell's output its record holds: never more than a record may weigh, and nothing without a trace."""

import json
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import nbformat
import pytest

from fvc_lib.execution.kernel.engine import BoundedClient
from fvc_lib.execution.kernel.outputs import RECORD_BYTES, CellOutputs, OutputFiles, RecordBudget, weight
from fvc_lib.services.records.redaction import Redactor
from tests.execution.conftest import write_notebook


class Cell:
    """One cell at work, with everything around it."""

    def __init__(self, folder: Path, budget: RecordBudget | None = None, label: str = "cell_01") -> None:
        self.cell = nbformat.v4.new_code_cell("")
        redactor = Redactor({"A_TOKEN": "open-sesame"})
        files = OutputFiles(folder / "logs", folder / "notebooks/record.ipynb", folder, redactor)
        self.outputs = CellOutputs(self.cell, label, budget or RecordBudget(), files, redactor)
        self._client = BoundedClient(nbformat.v4.new_notebook(cells=[self.cell]), redactor)
        self._client.outputs = self.outputs

    def hear(self, kind: str, **content: object) -> None:
        self._client.process_message({"msg_type": kind, "content": content, "parent_header": {}}, self.cell, 0)

    def show(self, text: str, display: str | None = None, kind: str = "display_data") -> None:
        transient = {"display_id": display} if display else {}
        self.hear(kind, data={"text/plain": text}, metadata={}, transient=transient)

    def end(self) -> list[dict]:
        self.outputs.close()
        return self.cell.outputs


def test_pieces_of_one_stream_are_one_output_and_both_streams_stay_in_order(tmp_path):
    cell = Cell(tmp_path)
    for name, text in [("stdout", "a"), ("stdout", "b\n"), ("stderr", "oh\n"), ("stdout", "c\n")]:
        cell.hear("stream", name=name, text=text)
    assert [(o["name"], o["text"]) for o in cell.end()] == [("stdout", "ab\n"), ("stderr", "oh\n"), ("stdout", "c\n")]


def test_a_progress_bar_leaves_its_last_state(tmp_path):
    cell = Cell(tmp_path)
    for step in range(5000):
        cell.hear("stream", name="stderr", text=f"\r{step:5d}/4999 " + "#" * 60)
    cell.hear("stream", name="stderr", text="\ndone\r\n")
    assert [o["text"] for o in cell.end()] == [" 4999/4999 " + "#" * 60 + "\ndone\r\n"]
    assert not (tmp_path / "logs").exists()


def test_a_display_that_is_updated_and_output_that_is_cleared_weigh_what_they_show(tmp_path):
    cell = Cell(tmp_path)
    cell.show("0", "bar")
    for step in range(300):
        cell.show(f"{step} " + "x" * 30_000, "bar", "update_display_data")
    assert cell.cell.outputs[0]["data"]["text/plain"].startswith("299 ")
    for step in range(300):
        cell.hear("clear_output", wait=True)
        cell.show(f"cleared {step} " + "x" * 30_000)
        cell.hear("stream", name="stdout", text=f"step {step}\n")
    shown = cell.end()
    assert [o.get("text", "")[:9] for o in shown] == ["", "step 299\n"]
    assert shown[0]["data"]["text/plain"].startswith("cleared 299 ")


def test_no_record_grows_too_large_whatever_its_cells_say(tmp_path):
    generator, budget, cells = random.Random(0), RecordBudget(), []
    for number in range(60):
        cell = Cell(tmp_path, budget, f"cell_{number:02d}")
        for _ in range(generator.randrange(25)):
            kind = generator.randrange(4)
            text = generator.choice(["\n", "\0", "é", "x\n", '"']) * generator.choice([10, 10_000, 400_000])
            if kind == 0:
                cell.show(text, generator.choice([None, "a"]))
            elif kind == 1:
                cell.show(text, "a", "update_display_data")
            elif kind == 2:
                cell.hear("error", ename="E", evalue=text, traceback=[text] * 5)
            else:
                cell.hear("stream", name=generator.choice(["stdout", "stderr"]), text=text)
        cells.append(cell.end())
    assert weight(cells) < RECORD_BYTES + 60 * 12_000 < 5_000_000


def test_whatever_is_not_in_the_record_is_behind_a_link_or_counted(tmp_path):
    cell = Cell(tmp_path)
    for number in range(60_000):
        cell.show(str(number))
    *shown, note = cell.end()
    left_out = int(note["data"]["text/plain"].split()[0].strip("["))
    assert len(shown) + left_out == 60_000
    assert left_out > 0


def test_an_error_is_told_even_where_there_is_no_room_left(tmp_path):
    cell = Cell(tmp_path, RecordBudget(0))
    for _ in range(100):
        cell.show("x" * 900)
    cell.hear("error", ename="ValueError", evalue="open-sesame", traceback=["line"])
    outputs = [o for o in cell.end() if o["output_type"] == "error"]
    assert [(o["ename"], o["evalue"]) for o in outputs] == [("ValueError", "[secret]")]


RUNNER = """
import sys
from pathlib import Path
from tests.execution.conftest import execute_notebook
folder = Path(sys.argv[1])
execute_notebook(folder / "one.ipynb", folder, {})
"""


@pytest.mark.fault(1)
def test_a_record_whose_writer_was_killed_shows_which_cell_was_running(tmp_path):
    write_notebook(tmp_path / "one.ipynb", ["1", "import time\nprint('so far', flush=True)\ntime.sleep(600)", "2"])
    record = tmp_path / "record.ipynb"
    runner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(RUNNER), str(tmp_path)])
    end = time.monotonic() + 300
    while not (record.exists() and told(record)[1]):  # the record is said to be never more than a fraction behind
        assert time.monotonic() < end
        time.sleep(0.05)
    runner.kill()
    runner.wait()
    states, said = told(record)
    assert states[-3:] == ["completed", "running", "pending"]
    assert said == ["so far\n"]


def told(record: Path) -> tuple[list[str], list[str]]:
    """What the record says of its cells, and what the cell that runs has printed."""
    cells = json.loads(record.read_text())["cells"]
    states = [cell["metadata"]["papermill"]["status"] for cell in cells]
    return states, [output["text"] for output in cells[-2]["outputs"]]
