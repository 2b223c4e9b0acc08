"""Row 40: a bit flipped at a random place of any file of a finished run; whoever reads it answers as before or says so.

Each command is asked before and after. Where its answer differs it names the file, or, for ``--resume``, repeats the
stage: never another number in silence.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

import run_notebooks
from fvc_lib.services.run_paths import RunPaths
from tests.faults.small_runs import NUM_FAULTS, QUICK, SEED

# What a run leaves for readers. Its pages are written anew from the rest.
KINDS = {
    "tables": ("tables/*",),
    "results": ("kfold_results.feather",),
    "checkpoints": ("checkpoints/**/*.safetensors", "checkpoints/**/*.pt", "checkpoints/**/*.sha256"),
    "outcomes": ("checkpoints/**/outcome.json", "checkpoints/**/selection.json", "checkpoints/**/code.json"),
    "records": ("checkpoints/stage_*.json",),
    "notebooks": ("notebooks/*.ipynb",),
    "logs": ("metrics/*.jsonl", "memory/*.jsonl", "memory/events/*.jsonl"),
    "documents": ("run.json", "params.yaml", "status.json", "status/*.json"),
}


class Readers:
    """Two copies of one finished run, and what each command answers about the first."""

    def __init__(self, folder: Path, whole: RunPaths) -> None:
        self.run, self.other = (RunPaths(folder / "default" / f"{whole.run_id[:-8]}{end * 8}") for end in "ab")
        for run in (self.run, self.other):
            shutil.copytree(whole.root, run.root)

    def ask(self) -> dict[str, list[str]]:
        """Every command's answer, with the page that it wrote, in lines."""
        root, other = str(self.run.root), str(self.other.root)
        commands = {
            "status": ["status", root],
            "compare": ["compare", root, other],
            "report": ["report", root],
            "index": ["index"],
            "resume": ["--resume", root, "--dry-run"],
        }
        pages = {"report": self.run.report_html, "index": self.run.root.parents[1] / "index.html"}
        answers = {}
        for name, arguments in commands.items():
            done = CliRunner().invoke(run_notebooks.main, arguments)
            assert done.exit_code in (0, 1, 2, 3), (name, done.output)
            assert "defect of FVC" not in done.output, (name, done.output)
            answers[name] = [f"exit code {done.exit_code}", *done.output.splitlines()]
            if name in pages and pages[name].is_file():
                answers[name] += pages[name].read_text().splitlines()
        return answers


def silent_changes(before: dict[str, list[str]], after: dict[str, list[str]], file: Path) -> list[str]:
    """The commands whose answer is another one and does not name the file in what is new of it."""
    found = []
    for name, lines in after.items():
        new = set(lines) - set(before[name])
        repeats = name == "resume" and any(line.startswith("  run ") for line in new)  # a stage done again is no lie
        if lines != before[name] and not repeats and not any(file.name in line for line in new):
            found.append(name)
    return found


@pytest.mark.long
@pytest.mark.fault(40)
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_of_a_finished_run_changes_no_answer_in_silence(whole_runs, tmp_path, monkeypatch, kind, tally):
    whole, chance = whole_runs(QUICK), random.Random(f"flips {kind} {SEED}")
    monkeypatch.setenv("FVC_RUNS_DIR", str(tmp_path))
    monkeypatch.setenv("FVC_CACHE_DIR", str(whole.run.root.parents[2] / "cache"))
    readers = Readers(tmp_path, whole.run)
    readers.ask()  # lists of runs name a page from when it is there
    before, said = readers.ask(), Counter[str]()
    report = readers.run.report_html.read_bytes()
    files = sorted({path for pattern in KINDS[kind] for path in readers.run.root.glob(pattern) if path.stat().st_size})
    silent = []
    for _ in range(NUM_FAULTS):
        path = chance.choice(files)
        content = path.read_bytes()
        place, bit = chance.randrange(len(content)), 1 << chance.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
        after = readers.ask()
        path.write_bytes(content)
        readers.run.report_html.write_bytes(report)  # status says how large a run is, pages of the flip before included
        said["as before" if after == before else "otherwise"] += 1
        if commands := silent_changes(before, after, path):
            silent.append(f"{path.relative_to(readers.run.root)}, bit {bit} of byte {place}: {', '.join(commands)}")
            tally.add(lost=1)
        else:
            tally.add(survived=1)
    print(f"FVC_FAULT_SEED={SEED}, {kind}: answered {dict(said)}")
    assert silent == []
