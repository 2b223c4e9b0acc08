"""How a run came about: code, versions, machine, attempts, and the commands that repeat it, as a part of a page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from fvc_lib.analysis.records import read_json_object
from fvc_lib.analysis.run_state import run_status
from fvc_lib.analysis.wording import NOT_RECORDED, bytes_text, clean_text, count_text, duration_text, time_text
from fvc_lib.services.run_paths import RunPaths

_NOT_WORTH_A_ROW = frozenset({"python_build", "torch_build"})


def provenance_html(run: RunPaths) -> str:
    """The body of "How this came about", for a page in the run's folder. What is not recorded is said to be so."""
    record = read_json_object(run.run_json)
    attempts = [each for each in _list(record.get("attempts")) if isinstance(each, dict)]
    first = attempts[0] if attempts else {}
    versions, hardware = _mapping(first.get("versions")), _mapping(first.get("hardware"))
    parts = (
        _repeat(record),
        "<h3>Code and machine</h3>",
        f'<div class="two">{_facts(_code_facts(run, first))}{_facts(_machine_facts(hardware, first))}</div>',
        _attempts(attempts),
        _accounting(run),
        _versions(versions),
    )
    return "".join(parts)


def _repeat(record: Mapping[str, Any]) -> str:
    commands = [clean_text(line) for line in _list(record.get("repeat")) if isinstance(line, str)]
    if not commands:
        return ""
    text = escape(" &&\n".join(commands))  # what follows a step that failed would run other code
    return (
        "<p>These commands repeat the run, from a checkout of the project:</p>"
        f'<div class="copyable"><pre id="repeat">{text}</pre><button data-copy="repeat">Copy</button></div>'
    )


def _code_facts(run: RunPaths, attempt: Mapping[str, Any]) -> dict[str, str]:
    """Names and HTML."""
    code = _mapping(attempt.get("code"))
    commit = _text(code.get("commit"))
    facts = {"Command": f"<code>{escape(_text(attempt.get('command')) or NOT_RECORDED)}</code>"}
    facts["Commit"] = f"<code>{escape(commit)}</code>" if commit else NOT_RECORDED
    if branch := _text(code.get("branch")):
        facts["Branch"] = escape(branch)
    facts["Changed since"] = _changes(run, code)
    if left_out := [_text(each) for each in _list(code.get("left_out"))]:
        facts["Not in the patch"] = escape("; ".join(filter(None, left_out)))
    if problem := _text(code.get("problem")):
        facts["Git said"] = escape(problem)
    return facts


def _changes(run: RunPaths, code: Mapping[str, Any]) -> str:
    changed = code.get("changed_since_commit")
    if changed is None:
        return NOT_RECORDED
    if not changed:
        return "nothing: the code is the commit's"
    if not run.code_patch.is_file():
        return '<span class="warning">yes, and no patch was kept</span>'
    name = os.fsdecode(run.code_patch.name)
    return f'yes: <a href="{escape(quote(name))}">{escape(name)}</a>, {bytes_text(run.code_patch.stat().st_size)}'


def _machine_facts(hardware: Mapping[str, Any], attempt: Mapping[str, Any]) -> dict[str, str]:
    slurm = _mapping(attempt.get("slurm"))
    gpus = [_text(each) or "?" for each in _list(hardware.get("gpus"))]
    threads = _text(hardware.get("omp_num_threads"))
    cores = hardware.get("cores")
    told = {
        "Started": time_text(_text(attempt.get("started_utc"))),
        "Host": _text(hardware.get("host")),
        "System": _text(hardware.get("system")),
        "Processor": _text(hardware.get("processor")),
        "Cores": f"{cores}" + (f", OMP_NUM_THREADS={threads}" if threads else "") if cores else None,
        "Memory": _memory(hardware),
        "Accelerators": ", ".join(gpus) or "none" if "gpus" in hardware else None,
        "SLURM": ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in slurm.items()) or None,
    }
    return {name: escape(clean_text(value)) for name, value in told.items() if value}


def _memory(hardware: Mapping[str, Any]) -> str | None:
    total, limit = _number(hardware.get("memory_bytes")), _number(hardware.get("memory_limit_bytes"))
    if total is None:
        return None
    limited = limit is not None and limit < total
    by = f", limited to {bytes_text(limit)} by {hardware.get('memory_limit_from')}" if limited else ""
    return bytes_text(total) + by


def _attempts(attempts: Sequence[Mapping[str, Any]]) -> str:
    if len(attempts) < 2:
        return ""
    rows = []
    for number, attempt in enumerate(attempts, start=1):
        hardware, slurm = _mapping(attempt.get("hardware")), _mapping(attempt.get("slurm"))
        differs = [f"{name}: {_change(pair)}" for name, pair in _mapping(attempt.get("differs")).items()]
        differs += [f"{name}: {_change(pair)}" for name, pair in _mapping(attempt.get("code_differs")).items()]
        cells = (
            str(number),
            time_text(_text(attempt.get("started_utc"))),
            _text(hardware.get("host")) or NOT_RECORDED,
            _text(slurm.get("job_id")) or "",
            _text(attempt.get("command")) or NOT_RECORDED,
            "; ".join(differs) or ("" if number == 1 else "nothing that counts"),
        )
        rows.append(cells)
    return f"<h3>{count_text(len(attempts), 'attempt')}</h3>" + _table(
        ("", "Started", "Host", "Job", "Command", "Differs from the one before"), rows
    )


def _change(pair: object) -> str:
    values = [_short(each) for each in _list(pair)]
    return " → ".join(values)


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    return text[:12] if len(text) in (40, 64) and text.isalnum() else text


def _accounting(run: RunPaths) -> str:
    """SLURM's own figures beside ours, where the site keeps accounts."""
    jobs = [
        each for each in _list(read_json_object(run.slurm / "accounting.json").get("jobs")) if isinstance(each, dict)
    ]
    if not jobs:
        return ""
    stages = run_status(run)["stages"]
    rows = []
    for job in jobs:
        task = _text(job.get("task")) or NOT_RECORDED
        ours = _number(_mapping(stages.get(task)).get("peak_rss_bytes"))
        theirs, seconds = _number(job.get("max_rss_bytes")), _number(job.get("elapsed_seconds"))
        row = (str(job.get("job_id")), task, str(job.get("state")), duration_text(seconds), bytes_text(theirs))
        rows.append((*row, bytes_text(ours)))
    return "<h3>Memory and time, as SLURM accounts for them</h3>" + _table(
        ("Job", "Task", "State", "Elapsed", "MaxRSS", "Our own peak"), rows
    )


def _versions(versions: Mapping[str, Any]) -> str:
    if not versions:
        return ""
    shown = {name: _text(value) or "not installed" for name, value in versions.items() if name not in _NOT_WORTH_A_ROW}
    for name, build in (("python", "python_build"), ("torch", "torch_build")):
        if name in shown and _text(versions.get(build)):
            shown[name] += f" ({versions[build]})"
    rows = _facts({name: escape(clean_text(value)) for name, value in shown.items()})
    summary = f"{count_text(len(shown), 'version')} of what it worked with"
    return f'<details class="code"><summary>{summary}</summary>{rows}</details>'


def _facts(facts: Mapping[str, str]) -> str:
    rows = "".join(f"<dt>{escape(clean_text(name))}</dt><dd>{value}</dd>" for name, value in facts.items())
    return f'<dl class="facts">{rows}</dl>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    lines = "".join("<tr>" + "".join(f"<td>{escape(clean_text(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="output"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str | None:
    return str(value) if isinstance(value, str | int) and value != "" and not isinstance(value, bool) else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
