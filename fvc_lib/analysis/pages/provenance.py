"""Provenance of a run, a section of its report: code, versions, machine, attempts, and commands to repeat it."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from fvc_lib.analysis.pages.page import render
from fvc_lib.analysis.read.records import as_list, as_number
from fvc_lib.analysis.wording import NOT_RECORDED, bytes_text, clean_text, time_text
from fvc_lib.services.atomic_files import as_mapping, as_text, read_json_object
from fvc_lib.services.run_paths import RunPaths


def provenance_html(run: RunPaths) -> Markup:
    """Return the section's HTML, for a page in the run's folder; missing facts are marked as not recorded."""
    record = read_json_object(run.run_json)
    attempts = [as_mapping(each) for each in as_list(record.get("attempts"))]
    first = attempts[0] if attempts else {}
    worked = next((each for each in attempts if not each.get("submits")), first)  # a login node computed nothing
    versions = as_mapping(worked.get("versions"))
    return render(
        "provenance.html",
        commands=[line for line in as_list(record.get("repeat")) if isinstance(line, str)],
        code=_code_facts(run, first, as_mapping(record.get("contents"))),
        machine=_machine_facts(worked),
        attempts=_attempts(attempts),
        versions={name: version or "not installed" for name, version in versions.items()},
    )


def _code_facts(run: RunPaths, attempt: Mapping[str, Any], contents: Mapping[str, Any]) -> dict[str, object]:
    code, changed = as_mapping(attempt.get("code")), NOT_RECORDED
    if code.get("changed_since_commit") is False:
        changed = "nothing: the code is the commit's"
    elif code.get("changed_since_commit") and run.code_patch.is_file():
        name, size = run.code_patch.name, bytes_text(run.code_patch.stat().st_size)
        changed = Markup('yes: <a href="{}">{}</a>, {}').format(quote(name), name, size)
    elif code.get("changed_since_commit"):
        changed = Markup('<span class="warning">yes, and no patch was kept</span>')
    facts = {
        "Command": Markup("<code>{}</code>").format(clean_text(attempt.get("command") or NOT_RECORDED)),
        "Commit": as_text(code.get("commit")) or NOT_RECORDED,
        "Branch": as_text(code.get("branch")),
        "Changed since": changed,
        "Not in the patch": "; ".join(map(str, as_list(code.get("left_out")))),
        "Problem with git": as_text(code.get("problem")),
        **{f"SHA-256 of {name}": str(value).replace("@", ": ") for name, value in contents.items() if value},
    }
    return {name: value for name, value in facts.items() if value}


def _machine_facts(attempt: Mapping[str, Any]) -> dict[str, object]:
    hardware = as_mapping(attempt.get("hardware"))
    total, limit = as_number(hardware.get("memory_bytes")), as_number(hardware.get("memory_limit_bytes"))
    memory = bytes_text(total) if total else None
    if total and limit and limit < total:
        memory = f"{memory}, limited to {bytes_text(limit)} by {hardware.get('memory_limit_from')}"
    slurm = as_mapping(attempt.get("slurm")).items()
    facts = {
        "Started": time_text(as_text(attempt.get("started_utc"))),
        "Host": hardware.get("host"),
        "System": hardware.get("system"),
        "Processor": hardware.get("processor"),
        "Cores": hardware.get("cores"),
        "OMP_NUM_THREADS": hardware.get("omp_num_threads"),
        "Memory": memory,
        "Accelerators": ", ".join(map(str, as_list(hardware.get("gpus")))) or ("none" if "gpus" in hardware else None),
        "SLURM": ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in slurm),
    }
    return {name: value for name, value in facts.items() if value}


def _attempts(attempts: Sequence[Mapping[str, Any]]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for number, attempt in enumerate(attempts, start=1):
        changed = as_mapping(attempt.get("differs")) | as_mapping(attempt.get("code_differs"))
        differs = [
            f"{name}: {' → '.join('none' if value is None else str(value)[:12] for value in as_list(pair))}"
            for name, pair in changed.items()
        ]
        rows.append(
            (
                number,
                time_text(as_text(attempt.get("started_utc"))),
                as_mapping(attempt.get("hardware")).get("host") or NOT_RECORDED,
                as_mapping(attempt.get("slurm")).get("job_id") or "",
                attempt.get("command") or NOT_RECORDED,
                "; ".join(differs) or ("" if number == 1 else "nothing that counts"),
            )
        )
    return rows
