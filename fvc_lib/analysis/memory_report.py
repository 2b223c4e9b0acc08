"""A run's memory, explained in a terminal: ``python -m fvc_lib.analysis.memory_report FILE|RUN``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import click

from fvc_lib.analysis.headline import run_parameters
from fvc_lib.analysis.memory_contexts import largest_tensors
from fvc_lib.analysis.memory_findings import MemoryFindings, find, run_memory
from fvc_lib.analysis.memory_logs import read_events, read_samples
from fvc_lib.analysis.memory_text import BLOCKS, PLAIN_BLOCKS, report_lines
from fvc_lib.analysis.records import LogFile
from fvc_lib.services.errors import FvcError, UsageError
from fvc_lib.services.path_text import message_text, path_to_text
from fvc_lib.services.run_paths import RunPaths

_SNIFFED_BYTES = 1 << 20


@dataclass(frozen=True)
class Subject:
    """What is reported on: findings, the run they belong to (which may hold nothing else), and a title."""

    found: MemoryFindings
    run: RunPaths
    title: str


def open_subject(path: Path) -> Subject:
    """The findings for a memory log (``memory/<stage>.jsonl``), its event log, or a whole run folder.

    Raises:
        UsageError: there is no such file or folder, or it is neither a memory log nor a run.
    """
    if path.is_dir():
        return _of_run(path)
    if not path.exists():
        raise UsageError(f"{_shown(path)}: no such file or folder. {_WANTED}")
    # The events of a stage lie in a folder of their own, below its samples and under the same name.
    samples_path = path.parent.parent / path.name if path.parent.name == "events" else path
    events_path = samples_path.parent / "events" / samples_path.name
    run = RunPaths(samples_path.absolute().parents[1])
    for each in (samples_path, events_path):
        _refuse_foreign(each)
    samples = read_samples([LogFile.named(samples_path, run.run_id)])
    events = read_events([LogFile.named(events_path, run.run_id)] if events_path.is_file() else [], samples.frame)
    found = find(samples, events)
    if samples.frame.is_empty() and samples_path.is_file() and samples_path.stat().st_size:
        counted = " ".join(samples.notes) or "It holds nothing but blank lines."
        raise UsageError(
            f"{_shown(samples_path)} is no memory log: no line of it is a memory sample. {counted} {_WANTED}"
        )
    return Subject(found, run, f"Memory of {_shown(path)}")


_WANTED = "Give one of a run's memory/*.jsonl files, or the run folder."


def _of_run(folder: Path) -> Subject:
    root = folder.parent if folder.name == "memory" else folder
    run = RunPaths(root.absolute())
    if not (root / "memory").is_dir() and not run.run_json.is_file():
        raise UsageError(f"{_shown(folder)} is no run folder: it has neither memory/ nor run.json. {_WANTED}")
    return Subject(run_memory(run), run, f"Memory of {path_to_text(run.run_id)}")


def _refuse_foreign(path: Path) -> None:
    """Gigabytes of a checkpoint or a video shall not be read as lines first."""
    if not path.is_file():
        return
    with path.open("rb") as stream:
        head = stream.read(_SNIFFED_BYTES)
    if len(head) == _SNIFFED_BYTES and b'{"' not in head:
        raise UsageError(f"{_shown(path)} is no memory log: its first {_SNIFFED_BYTES:,} bytes hold no line. {_WANTED}")


def _shown(path: Path) -> str:
    return repr(message_text(str(path)))


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("log", metavar="FILE|RUN", type=click.Path(path_type=Path))
@click.option(
    "--width", type=click.IntRange(20, 400), default=60, show_default=True, help="Characters of the timeline."
)
def main(log: Path, width: int) -> None:
    """Explain the memory of one stage (a memory/*.jsonl file) or of a whole run (its folder).

    Says where memory peaked and what it consisted of, draws it over time, lists every moment above 90% of the budget,
    judges growth from epoch to epoch, tells each out-of-memory and what was done, compares the prediction with what
    was measured, and ends with what to change. Works while the run goes on, and on logs that a crash has torn: lines
    that cannot be read are counted.

    \b
    python -m fvc_lib.analysis.memory_report runs/demo/run_20250304_101500_abcdef01
    python -m fvc_lib.analysis.memory_report runs/demo/run_*/memory/04_fold_training_fold_0.jsonl
    python -m fvc_lib.analysis.memory_report FILE --width 120 | less

    Megabytes are 1e6 bytes. Resident memory counts the process with its children, as a job's limit does. Exit codes:
    0 reported, 2 the file is no memory log.
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    try:
        subject = open_subject(log)
    except FvcError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        click.echo(f"error: {_shown(log)}: {error.strerror}. {_WANTED}", err=True)
        sys.exit(2)
    blocks = BLOCKS if _can_show(BLOCKS) else PLAIN_BLOCKS
    asked, tensors = run_parameters(subject.run), largest_tensors(subject.run, subject.found)
    for line in report_lines(subject.found, asked, tensors, title=subject.title, width=width, blocks=blocks):
        click.echo(line.encode(_encoding(), "replace").decode(_encoding()))


def _encoding() -> str:
    return sys.stdout.encoding or "ascii"


def _can_show(text: str) -> bool:
    try:
        text.encode(_encoding())
    except UnicodeEncodeError:
        return False
    return True


if __name__ == "__main__":
    main()
