"""Write and read ``run.json`` and ``params.yaml``, the record of a run.

The record has the run's parameters, code, package versions and hardware, and the commands that repeat the run.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from fvc_lib import CHECKOUT
from fvc_lib.execution.plan import content_chosen, corpus_record
from fvc_lib.execution.run.status import RunState, RunStatus, record_held
from fvc_lib.services.atomic_files import content_hash, sha256_of_json, utc_now, write_bytes, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.memory import memory_budget
from fvc_lib.services.records.digests import document_damage, undamaged_file, write_document
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths, new_run

_GIT_SECONDS, _GPU_SECONDS = 20.0, 10.0
_LARGEST_PATCH_BYTES = 4 << 20
# Patterns of files not tracked by git that can change what a run does; the patch has them as well.
_CODE = ("*.py", "*.pyi", "*.ipynb", "*.yaml", "*.yml", "*.toml", "*.lock", "*.cfg", "*.sh", "*.sbatch", "Makefile")
RECORDED_PACKAGES = (
    "fvc_lib", "av", "duckdb", "ipykernel", "jupyter_client", "matplotlib", "nbclient", "nbconvert", "nbformat",
    "numpy", "papermill", "plotly", "polars", "psutil", "pyarrow", "pydantic", "safetensors", "scikit-learn", "scipy",
    "torch", "torchvision",
)  # fmt: skip
# Packages whose version can change the order of additions, and with it the last bits of a sum. So can another processor
# or another number of threads.
BITS_DEPEND_ON = ("python", "numpy", "torch")
_SLURM = {
    "job_id": "SLURM_JOB_ID", "array_task_id": "SLURM_ARRAY_TASK_ID", "nodes": "SLURM_JOB_NODELIST",
    "cpus_per_task": "SLURM_CPUS_PER_TASK",
}  # fmt: skip


@dataclass(frozen=True)
class CodeState:
    """The version of the code: a commit, and a patch with the changes since that commit.

    Without a git checkout, all fields have their defaults.
    """

    commit: str | None = None  # full hash of HEAD; None outside a git checkout
    changed_since_commit: bool | None = None  # None outside a git checkout
    patch: bytes = b""  # input for ``git apply``; empty if nothing changed, or if it would exceed 4 MiB

    def record(self) -> dict[str, object]:
        """Return the fields for ``run.json``: ``commit``, ``changed_since_commit`` and ``patch_sha256``.

        ``patch_sha256`` is the SHA-256 of the patch in hexadecimal, or None without a patch.
        """
        fields = asdict(self)
        patch = fields.pop("patch")
        return {**fields, "patch_sha256": hashlib.sha256(patch).hexdigest() if patch else None}


def code_state(checkout: Path = CHECKOUT) -> CodeState:
    """Return the commit of the git checkout ``checkout``, and the changes since this commit.

    If git fails, or ``checkout`` is no git checkout, the returned object has only defaults.
    """
    # If git has started this process, git's environment variables name another repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*arguments: str) -> bytes:
        command = ["git", "--no-optional-locks", "-C", str(checkout), *arguments]
        done = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS, check=False, env=environ)
        if done.returncode not in (0, 1 if "--no-index" in arguments else 0):
            raise OSError(done.stderr.decode("utf-8", "replace"))
        return done.stdout

    plain = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/")
    try:
        if Path(os.fsdecode(git("rev-parse", "--show-toplevel")).strip()).resolve() != checkout.resolve():
            return CodeState()
        commit = git("rev-parse", "HEAD").decode().strip()
        # The user's own settings must not hide a change.
        status = git("status", "--porcelain", "--untracked-files=normal", "--ignore-submodules=none")
        patch = git("diff", "HEAD", *plain)
        for name in git("ls-files", "--others", "--exclude-standard", "-z", "--", *_CODE).split(b"\0")[:-1]:
            patch += git("diff", "--no-index", *plain, "--", os.devnull, os.fsdecode(name))
    except (OSError, subprocess.SubprocessError):
        return CodeState()
    return CodeState(commit, bool(status), patch if len(patch) <= _LARGEST_PATCH_BYTES else b"")


def versions() -> dict[str, str | None]:
    """Return ``{package: version}`` for Python and ``RECORDED_PACKAGES``; None for packages that are not installed."""
    known: dict[str, str | None] = dict.fromkeys(RECORDED_PACKAGES)
    for name in RECORDED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            known[name] = metadata.version(name)
    return {"python": platform.python_version(), **known}


def hardware() -> dict[str, object]:
    """Return a description of this machine for ``run.json``, without loading torch.

    The keys are ``host``, ``machine`` (architecture), ``system``, ``processor``, ``cores``, ``omp_num_threads``,
    ``memory_bytes``, ``memory_limit_bytes`` and ``gpus`` (product names).
    """
    cpuinfo = Path("/proc/cpuinfo")
    of_linux = cpuinfo.read_text() if cpuinfo.exists() else ""
    model = re.search(r"^model name\s*: (.+)$", of_linux, re.MULTILINE)
    processor = model[1] if model else platform.processor() or None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "processor": processor,
        "cores": cores,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_limit_bytes": memory_budget().total_bytes,
        "gpus": gpus(),
    }


def slurm_job() -> dict[str, str] | None:
    """Return facts about the SLURM job of this process as texts, such as its ``job_id``; None outside a SLURM job.

    The keys are ``job_id``, ``array_task_id``, ``nodes`` and ``cpus_per_task``. Unknown facts are left out.
    """
    facts = {name: os.environ[variable] for name, variable in _SLURM.items() if os.environ.get(variable)}
    return facts if "job_id" in facts else None


def gpus() -> list[str]:
    """Return the product names of this machine's NVIDIA GPUs, such as ``NVIDIA H200``, one per GPU.

    The list is empty if the command ``nvidia-smi`` is missing or fails.
    """
    try:  # lines such as "GPU 0: NVIDIA H200 (UUID: GPU-...)"
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_GPU_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    return re.findall(r"^GPU \d+: *(.+?) *(?: \(UUID.*)?$", done.stdout, re.MULTILINE)


def repeat_commands(code: CodeState, params: Path, patch: Path, *, command: str = "") -> list[str]:
    """Return shell commands that repeat a run from any checkout of the project.

    The last bits of results depend on ``OMP_NUM_THREADS``. So the commands set the value that this process has.

    Args:
        code: the version of the run's code.
        params: the run's YAML file of parameters.
        patch: the file with the patch of ``code``.
        command: the command that made the run, if its parameters alone do not suffice to repeat it. A fork (a run that
            copied finished stages of another run) needs it. Empty: not needed.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    run = command or f"python run_notebooks.py --params {shlex.quote(str(params))}"
    checkout = [f"git checkout {code.commit}"] if code.commit else []
    patched = [f"git apply --whitespace=nowarn {shlex.quote(str(patch))}"] if code.patch else []
    with_threads = f"OMP_NUM_THREADS={shlex.quote(threads)} {run}" if threads else run
    return [*checkout, *patched, with_threads]


def bits_depend_on(attempt: Mapping[str, Any]) -> dict[str, object]:
    """Return ``{property: value}`` of the versions and hardware on which the last bits of floating-point sums depend.

    The properties are the versions of Python, NumPy and torch, and ``threads``, ``machine``, ``processor`` and
    ``accelerators``.

    Args:
        attempt: an item of ``attempts`` in ``run.json``, which has one item for every command that worked on the run.
    """
    machine = attempt["hardware"]
    threads = machine["omp_num_threads"] or (attempt["slurm"] or {}).get("cpus_per_task") or machine["cores"]
    libraries = {name: attempt["versions"][name] for name in BITS_DEPEND_ON}
    return {
        **libraries,
        "threads": str(threads),
        "machine": machine["machine"],
        "processor": machine["processor"],
        "accelerators": ", ".join(sorted(set(machine["gpus"]))) or "none",
    }


def run_hash(config: RunConfig, corpus: Mapping[str, str] | None = None) -> str:
    """Return a SHA-256 of a configuration and of the files of its corpora. Equal runs have the same hash.

    The hash does not depend on the machine.

    Args:
        config: the configuration.
        corpus: the result of ``corpus_record(config)``; None: computed by this function.
    """
    return sha256_of_json([config.config_hash, corpus or corpus_record(config)])


def begin_run(
    config: RunConfig,
    *,
    command: str,
    prepare: Callable[[RunPaths], Mapping[str, object]] | None = None,
    state: RunState = "running",
    submits: bool = False,
) -> RunPaths:
    """Create a run folder, write the first files into it, and return its paths.

    The files are the run's record, its parameters, its status, and a patch with the code's changes since the commit.

    Args:
        config: the run's parameters.
        command: the command that was typed.
        prepare: called with the new folder before ``run.json`` is written; its result is added to ``run.json``.
        state: the run's state until a process works on it.
        submits: whether this command only submits jobs to SLURM and computes nothing.

    Raises:
        UsageError: the experiment's name cannot be the name of a folder.
        OSError: the runs folder cannot be written.
    """
    corpus, code = corpus_record(config), code_state()
    digest = run_hash(config, corpus)
    run = new_run(Path(config.runs_dir), config.experiment, digest)
    write_text(run.params_yaml, config.to_yaml())
    network = DETECTORS.file_of(config.model)
    if network is not None and network.is_file():  # so that the run folder has the code of what was trained
        write_bytes(run.networks / network.name, network.read_bytes())
    RunStatus(run_id=run.run_id, state=state, started_utc=utc_now()).write(run)
    prepared = {} if prepare is None else prepare(run)
    if code.patch:
        write_bytes(run.code_patch, code.patch)
    needed = command if "forked_from" in prepared else ""
    record = {
        "run_id": run.run_id,
        "experiment": config.experiment,
        "config_hash": digest,
        "corpus": corpus | _indexed(run),
        "params": config.model_dump(mode="json"),
        "params_sha256": [content_hash(run.params_yaml)],
        "contents": content_chosen(config),
        "repeat": repeat_commands(code, run.params_yaml, run.code_patch, command=needed),
        **prepared,
        "attempts": [_attempt(command, code, submits)],
    }
    write_document(run.run_json, record)  # last: a folder without run.json is not a run
    return run


def record_resumption(run: RunPaths, config: RunConfig, *, command: str, submits: bool = False) -> list[str]:
    """Record in ``run.json`` that a command resumes the run, and write ``config`` into ``params.yaml``.

    A new item is added to ``attempts`` and compared with the last attempt that computed. If versions, processor or
    threads differ, the item's field ``differs`` is ``{name: [before, now]}``. The record's field ``bit_equal_resume``
    then becomes false for good: results may differ from those of an uninterrupted run in the last bits. If the commit
    or the patch differs from the last attempt's, ``code_differs`` has the old and new value. Several jobs may call this
    function at the same time.

    Args:
        run: the run.
        config: the run's parameters, of which some (memory, device, workers) may be new.
        command: the command that was typed.
        submits: whether the command only submits jobs. It computes nothing then, and its versions are not compared.

    Returns:
        A text for each difference of versions and hardware, such as ``torch 2.4 -> 2.5``; empty if there is none.

    Raises:
        DataError: ``run.json`` cannot be read, or another process has locked it for too long.
    """
    now = _attempt(command, code_state(), submits)
    with record_held(run.run_json):
        record = read_run_record(run)
        worked = [attempt for attempt in record["attempts"] if not attempt["submits"]]
        before = bits_depend_on(worked[-1]) if worked and not submits else {}
        then = bits_depend_on(now)
        differs = {name: [before[name], then[name]] for name in before if before[name] != then[name]}
        if differs:
            now["differs"], record["bit_equal_resume"] = differs, False
        last, code = record["attempts"][-1]["code"], now["code"]
        names = [name for name in ("commit", "patch_sha256") if last[name] != code[name]]
        if names:
            now["code_differs"] = {name: [last[name], code[name]] for name in names}
        record["attempts"].append(now)
        # If the process is killed between the two writes, either version of params.yaml is accepted.
        params = hashlib.sha256(config.to_yaml().encode("utf-8", "surrogateescape")).hexdigest()
        write_document(run.run_json, {**record, "params_sha256": [params, content_hash(run.params_yaml)]})
        write_text(run.params_yaml, config.to_yaml())
    return [f"{name} {old} -> {new}" for name, (old, new) in differs.items()]


def record_corpus(run: RunPaths) -> None:
    """Add a hash of the contents of the corpus's files to ``run.json``.

    The hash is computed from the run's index (the table of these files). Nothing happens if there is no index yet, or
    if ``run.json`` is damaged.
    """
    with contextlib.suppress(OSError, DataError), record_held(run.run_json):
        record = read_run_record(run)
        corpus = record["corpus"] | _indexed(run)
        if corpus != record["corpus"]:
            write_document(run.run_json, {**record, "corpus": corpus})


def read_run_record(run: RunPaths) -> dict[str, Any]:
    """Read ``run.json``, the record of ``run``, check it, and return it as a dict.

    The record has the run's parameters, code, package versions and hardware.

    Raises:
        DataError: ``run.json`` cannot be read or is damaged.
    """
    try:
        record: dict[str, Any] = json.loads(run.run_json.read_bytes())
        bits_depend_on(record["attempts"][-1])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{run.run_json}: not a run's record: {error!r}. Start a new run.") from error
    if damage := document_damage(run.run_json, record):
        raise DataError(f"{damage} Or begin a new run.")
    return record


def _indexed(run: RunPaths) -> dict[str, object]:
    """Return a fingerprint of the corpus, computed from the run's index (the table of its files).

    Returns:
        A dict. ``fingerprint`` is a SHA-256 over the sorted content hashes of the files. ``corpora`` is the sorted list
        of the names in the index's column ``corpus``; the key is missing if the index has no such column. The dict is
        empty if there is no index, or if the index has no files.
    """
    import polars as pl

    for path in (run.index, run.images, run.video_texts):
        with contextlib.suppress(OSError, DataError, pl.exceptions.PolarsError):  # missing or damaged
            with undamaged_file(path) as stream:
                table = pl.scan_parquet(stream).select(pl.col("^(content_sha256|corpus)$").unique().sort().implode())
                found = table.collect().row(0, named=True)
            names = {"corpora": found["corpus"]} if "corpus" in found else {}
            return {"fingerprint": sha256_of_json(found["content_sha256"])} | names if found["content_sha256"] else {}
    return {}


def _attempt(command: str, code: CodeState, submits: bool) -> dict[str, Any]:
    return {
        "started_utc": utc_now(),
        "command": command,
        "submits": submits,
        "code": code.record(),
        "versions": versions(),
        "hardware": hardware(),
        "slurm": slurm_job(),
    }
