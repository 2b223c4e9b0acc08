"""``run.json`` and ``params.yaml``: what was asked, with which code, versions and hardware, and how to repeat it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fvc_lib.execution.code_state import CodeState, code_state
from fvc_lib.execution.provenance import bits_depend_on, hardware, repeat_commands, slurm_job, versions
from fvc_lib.execution.status import RunState, RunStatus, utc_now
from fvc_lib.services.atomic_files import write_bytes, write_json, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.redaction import Redactor
from fvc_lib.services.run_paths import RunPaths, new_run

# Noting an attempt takes milliseconds; who holds the record for longer has died, or its disk has.
PATIENCE_SECONDS = 20.0
_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})


def begin_run(
    config: RunConfig,
    *,
    command: str,
    prepare: Callable[[RunPaths], Mapping[str, object]] | None = None,
    state: RunState = "running",
) -> RunPaths:
    """Create a run folder with its record, parameters, patch of the code and first status.

    Args:
        config: the run's parameters.
        command: what was typed.
        prepare: called with the new folder before it counts as a run; what it returns is recorded as well.
        state: what its status says until somebody works on it.

    Raises:
        UsageError: the experiment's name is not one folder name.
        OSError: the runs folder cannot be written.
    """
    run = new_run(Path(config.runs_dir), config.experiment, config.config_hash)
    write_text(run.params_yaml, config.to_yaml())
    RunStatus(run_id=run.run_id, state=state, started_utc=utc_now()).write(run)
    prepared = {} if prepare is None else prepare(run)
    code = code_state()
    if code.patch:
        write_bytes(run.code_patch, code.patch)
    needed = command if "forked_from" in prepared else ""
    record = {
        "run_id": run.run_id,
        "experiment": config.experiment,
        "config_hash": config.config_hash,
        "params": config.model_dump(mode="json"),
        "repeat": repeat_commands(code, run.params_yaml, run.code_patch, command=needed),
        **prepared,
        "attempts": [_attempt(command, code)],
    }
    # Last: a folder without run.json is a run that never began, and is listed nowhere.
    write_json(run.run_json, _redacted(record))
    return run


def record_resumption(run: RunPaths, config: RunConfig, *, command: str) -> list[str]:
    """Add an attempt to ``run.json``, and keep what it changed (memory, device, workers) in ``params.yaml``.

    Where versions, processor or threads differ from the attempt before, the attempt's ``differs`` holds
    ``{name: [before, now]}`` and the record no longer claims that the resumed run is bit for bit the undisturbed one:
    ``bit_equal_resume`` is false, for good, with every reason in ``bit_equal_resume_because``. Another commit or patch
    stands in ``code_differs``; a new patch lies beside the first one.

    Several jobs may do this at once, on several hosts.

    Returns:
        The differences, one readable clause each; for a warning.

    Raises:
        DataError: ``run.json`` is not readable, or another process has been holding it for too long.
    """
    code = code_state()
    now = _redacted(_attempt(command, code))
    with _record_held(run):
        try:
            record = json.loads(run.run_json.read_text())
            clauses = _note_differences(record, now)
            record["attempts"].append(now)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(f"{run.run_json}: not a run's record: {error!r}. Start a new run.") from error
        if "code_differs" in now and code.patch:
            write_bytes(_patch_path(run, code), code.patch)
        write_text(run.params_yaml, config.to_yaml())
        write_json(run.run_json, record)
    return clauses


def _note_differences(record: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Write into both what ``now`` differs in from the last attempt; returns what the bits depend on, in words."""
    last = record["attempts"][-1]
    before, then = bits_depend_on(last), bits_depend_on(now)
    differs = {name: [before[name], then[name]] for name in then if name in before and before[name] != then[name]}
    clauses = [f"{name} {old} -> {new}" for name, (old, new) in differs.items()]
    if differs:
        now["differs"] = differs
        record["bit_equal_resume"] = False
        record["bit_equal_resume_because"] = [*record.get("bit_equal_resume_because", []), *clauses]
    code = {
        name: [last.get("code", {}).get(name), now["code"].get(name)]
        for name in ("commit", "patch_sha256")
        if last.get("code", {}).get(name) != now["code"].get(name)
    }
    if code:
        now["code_differs"] = code
    return clauses


def _attempt(command: str, code: CodeState) -> dict[str, object]:
    """When, how, with which code and on what machine an attempt began."""
    return {
        "started_utc": utc_now(),
        "command": command,
        "code": code.record(),
        "versions": versions(),
        "hardware": hardware(),
        "slurm": slurm_job(),
    }


def _patch_path(run: RunPaths, code: CodeState) -> Path:
    return run.code_patch.with_name(f"{run.code_patch.stem}_{(code.patch_sha256 or '')[:8]}{run.code_patch.suffix}")


def _redacted(value: Any, redactor: Redactor | None = None) -> Any:
    """``value`` with each text in it free of secrets."""
    redactor = redactor or Redactor()
    if isinstance(value, str):
        return redactor.text(value)
    if isinstance(value, Mapping):
        return {redactor.text(str(name)): _redacted(each, redactor) for name, each in value.items()}
    return [_redacted(each, redactor) for each in value] if isinstance(value, list | tuple) else value


@contextmanager
def _record_held(run: RunPaths) -> Iterator[None]:
    """Hold ``run.json`` against other processes; the system lets go of it when this one dies."""
    path = run.run_json.with_name("run.json.lock")
    with path.open("a+b") as stream:
        if _locked(stream, run):
            yield
            return
    # No locks on this disk: a name that only one can create. One claim that stays for so long is a dead process's;
    # many that follow one another are not.
    claim = run.run_json.with_name("run.json.claim")
    seen, end = None, 0.0
    while not _created(claim):
        if (found := _identity(claim)) != seen:
            seen, end = found, time.monotonic() + PATIENCE_SECONDS
        elif time.monotonic() > end:
            claim.unlink(missing_ok=True)
        time.sleep(0.02)
    try:
        yield
    finally:
        claim.unlink(missing_ok=True)


def _locked(stream: IO[bytes], run: RunPaths) -> bool:
    """Lock ``stream`` until it is closed; False where the file system has no locks."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            if time.monotonic() > end:
                raise DataError(
                    f"{run.run_json}: another process has been writing it for {PATIENCE_SECONDS:.0f} s. "
                    "If none is alive, its host or disk hangs: try again, or from that host."
                ) from error
        time.sleep(0.02)


def _identity(claim: Path) -> tuple[int, int] | None:
    """What tells one claim from the next of the same name; None: it is gone."""
    try:
        status = claim.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _created(claim: Path) -> bool:
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True
