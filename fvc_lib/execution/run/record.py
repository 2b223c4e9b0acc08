"""``run.json`` and ``params.yaml``: what was asked, with which code, versions and hardware, and how to repeat it."""

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from fvc_lib import CHECKOUT
from fvc_lib.execution.plan.fingerprint import content_chosen, corpus_record
from fvc_lib.execution.run.status import RunState, RunStatus
from fvc_lib.services.atomic_files import path_to_text, sha256_of_json, utc_now, write_bytes, write_text
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError
from fvc_lib.services.memory.budget import memory_budget
from fvc_lib.services.records.digests import content_hash, document_damage, undamaged_file, write_document
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths, new_run

# Which code a run works with: the commit of this checkout, and as a patch what is changed since.

# Of the files that git does not know, those that can change what a run does.
_CODE = ("*.py", "*.pyi", "*.ipynb", "*.yaml", "*.yml", "*.toml", "*.lock", "*.cfg", "*.sh", "*.sbatch", "Makefile")
_LARGEST_FILE_BYTES = 1 << 20
_LARGEST_PATCH_BYTES = 4 << 20
_SECONDS = 20.0


@dataclass(frozen=True)
class CodeState:
    """The code as it is now."""

    commit: str | None = None  # full hash of HEAD; None outside a git checkout
    branch: str | None = None  # its name; None when HEAD is detached
    changed_since_commit: bool | None = None  # whether anything differs from the commit; None outside a git checkout
    patch: bytes = b""  # what ``git apply`` makes the commit into this code with; empty when nothing is changed
    left_out: tuple[str, ...] = ()  # what the patch does not hold, each with the reason
    problem: str | None = None  # why git could not tell, in its own words

    @property
    def patch_sha256(self) -> str | None:
        """Hex SHA-256 of the patch; None without one."""
        return hashlib.sha256(self.patch).hexdigest() if self.patch else None

    def record(self) -> dict[str, object]:
        """For ``run.json``: all but the patch itself."""
        known = asdict(self)
        del known["patch"]
        return {**known, "left_out": list(self.left_out), "patch_sha256": self.patch_sha256}


class _GitError(Exception):
    """Git is missing, took too long or refused; the text is its own."""


def code_state(checkout: Path = CHECKOUT) -> CodeState:
    """Return the state of ``checkout``; what git cannot tell is None, with the reason.

    A patch of more than 4 MiB is left out.
    """
    try:
        if Path(_text(checkout, "rev-parse", "--show-toplevel")).resolve() != checkout.resolve():
            return CodeState(problem="not a git checkout of its own")
        commit = _text(checkout, "rev-parse", "HEAD")
        # What a user has set for their own eyes must not hide a change from the record.
        changed = bool(_git(checkout, "status", "--porcelain", "--untracked-files=normal", "--ignore-submodules=none"))
        branch = _text(checkout, "rev-parse", "--abbrev-ref", "HEAD")
    except _GitError as error:
        return CodeState(problem=str(error))
    state = CodeState(commit, None if branch == "HEAD" else branch, changed)
    if not changed:
        return state
    try:
        patch, left_out = _patch(checkout)
    except (_GitError, OSError) as error:
        return replace(state, problem=f"no patch: {error}")
    if len(patch) > _LARGEST_PATCH_BYTES:
        left_out.append(f"the patch itself: {len(patch) / 1e6:.1f} MB, more than {_LARGEST_PATCH_BYTES / 1e6:.1f} MB")
        patch = b""
    return replace(state, patch=patch, left_out=tuple(left_out))


def _patch(checkout: Path) -> tuple[bytes, list[str]]:
    """The difference from HEAD, staged or not, with new files of code; and the files that are too large for it.

    The checkout is not touched: new files are added to a temporary copy of its index.
    """
    listed = _git(checkout, "ls-files", "--others", "--exclude-standard", "-z", "--", *_CODE)
    new = [os.fsdecode(name) for name in listed.split(b"\0") if name]
    changed = _git(checkout, "diff", "HEAD", "--name-only", "--no-ext-diff", "--no-renames", "-z").split(b"\0")
    large = {
        name: size
        for name in {*new, *(os.fsdecode(each) for each in changed if each)}
        if (size := _size_bytes(checkout / name)) > _LARGEST_FILE_BYTES
    }
    added = b"\0".join(os.fsencode(name) for name in new if name not in large)
    with tempfile.TemporaryDirectory() as folder:
        index, objects = Path(folder) / "index", Path(folder) / "objects"
        objects.mkdir()
        # With its time: by that git knows which files may have changed within the second they were added in.
        shutil.copy2(checkout / _text(checkout, "rev-parse", "--git-path", "index"), index)
        elsewhere = {
            "GIT_INDEX_FILE": str(index),
            "GIT_OBJECT_DIRECTORY": str(objects),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(
                (checkout / _text(checkout, "rev-parse", "--git-path", "objects")).resolve()
            ),
        }
        if added:
            add = ("--literal-pathspecs", "add", "--intent-to-add", "--pathspec-from-file=-", "--pathspec-file-nul")
            _git(checkout, *add, environment=elsewhere, given=added)
        plain = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/")
        but = [f":(exclude,top,literal){name}" for name in large]
        patch = _git(checkout, "diff", "HEAD", *plain, "--", ":/", *but, environment=elsewhere)
    return patch, [f"{path_to_text(name)} ({size / 1e6:.1f} MB)" for name, size in sorted(large.items())]


def _size_bytes(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:  # deleted since the commit
        return 0


def _text(checkout: Path, *arguments: str) -> str:
    return os.fsdecode(_git(checkout, *arguments)).strip()


def _git(checkout: Path, *arguments: str, environment: Mapping[str, str] | None = None, given: bytes = b"") -> bytes:
    # What the caller's own git command has set must not lead to another repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(checkout), *arguments]
    try:
        done = subprocess.run(
            command,
            input=given,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
            env={**environ, **(environment or {})},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise _GitError(f"git could not be asked: {error}") from error
    if done.returncode:
        raise _GitError((done.stderr.decode("utf-8", "replace").strip().splitlines() or ["git failed"])[0])
    return done.stdout


# On what an attempt at a run works: versions, hardware, host and SLURM job; and how to repeat it.

RECORDED_PACKAGES = (
    "fvc_lib", "av", "duckdb", "ipykernel", "jupyter_client", "nbclient", "nbconvert", "nbformat", "numpy",
    "pandera", "papermill", "plotly", "polars", "psutil", "pyarrow", "pydantic", "safetensors", "scikit-learn", "scipy",
    "torch", "torchvision",
)  # fmt: skip
# Other versions of these, another processor or another number of threads add numbers up in another order.
BITS_DEPEND_ON = ("python", "numpy", "torch")
_TORCH_BUILD = re.compile(r"^(cuda|hip|git_version)\b[^=\n]*= *'([^'\n]+)'", re.MULTILINE)
_SLURM = {
    "job_id": "SLURM_JOB_ID",
    "array_job_id": "SLURM_ARRAY_JOB_ID",
    "array_task_id": "SLURM_ARRAY_TASK_ID",
    "job_name": "SLURM_JOB_NAME",
    "cluster": "SLURM_CLUSTER_NAME",
    "partition": "SLURM_JOB_PARTITION",
    "nodes": "SLURM_JOB_NODELIST",
    "tasks": "SLURM_NTASKS",
    "cpus_per_task": "SLURM_CPUS_PER_TASK",
    "restarts": "SLURM_RESTART_COUNT",
}
_GPU_SECONDS = 10.0


def versions() -> dict[str, str | None]:
    """Of Python and of what the numbers or the record depend on; None for what is not installed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "python_build": f"{platform.python_implementation()} {' '.join(platform.python_build())}, "
        f"{platform.python_compiler()}",
    }
    for name in RECORDED_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return {**found, "torch_build": _torch_build()}


def hardware(environ: Mapping[str, str] | None = None) -> dict[str, object]:
    """Processor, cores, memory and who limits it, accelerators; torch is not loaded for it."""
    environ = os.environ if environ is None else environ
    budget = memory_budget(environ=environ)
    return {
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cores_of_machine": os.cpu_count(),
        "omp_num_threads": environ.get("OMP_NUM_THREADS"),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_limit_bytes": budget.total_bytes,
        "memory_limit_from": budget.origin,
        "gpus": gpus(),
        "gpus_visible": environ.get("CUDA_VISIBLE_DEVICES"),
    }


def slurm_job(environ: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """What SLURM says of the job this process is in; None outside one."""
    environ = os.environ if environ is None else environ
    found = {name: environ[variable] for name, variable in _SLURM.items() if environ.get(variable)}
    return found if "job_id" in found else None


def gpus(root: Path = Path("/")) -> list[str]:
    """The names of NVIDIA's accelerators that this machine shows, of its driver's files or else of ``nvidia-smi``."""
    listed = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    found = [name for path in listed if (name := _field(path, "Model"))]
    return found or _gpus_by_program()


def repeat_commands(
    code: CodeState, params: Path, patch: Path, *, command: str = "", environ: Mapping[str, str] | None = None
) -> list[str]:
    """Shell commands that bring a run about again, from any checkout of the project.

    ``params`` are its resolved parameters, ``patch`` is where the patch of its code lies, and ``command`` what to run
    where that takes more than parameters (a fork). The number of threads, on which the last bits depend, is the
    environment's.
    """
    threads = (os.environ if environ is None else environ).get("OMP_NUM_THREADS")
    run = command or f"python run_notebooks.py --params {shlex.quote(str(params))}"
    return [
        *([f"git checkout {code.commit}"] if code.commit else []),
        *([f"git apply --whitespace=nowarn {shlex.quote(str(patch))}"] if code.patch else []),
        f"OMP_NUM_THREADS={shlex.quote(threads)} {run}" if threads else run,
    ]


def bits_depend_on(attempt: Mapping[str, Any]) -> dict[str, object]:
    """What a sum of floats depends on besides its numbers, as far as is known before torch has started."""
    recorded, machine = attempt["versions"], attempt["hardware"]
    of_job = (attempt.get("slurm") or {}).get("cpus_per_task")
    threads = machine.get("omp_num_threads") or of_job or machine["cores"]
    return {
        **{name: recorded.get(name) for name in BITS_DEPEND_ON},
        "threads": str(threads),
        "machine": machine["machine"],
        # Attempts of an earlier version did not note these: that is no difference.
        **({"processor": machine["processor"]} if machine.get("processor") else {}),
        **({"accelerators": ", ".join(sorted(set(machine["gpus"]))) or "none"} if "gpus" in machine else {}),
    }


def _torch_build() -> str | None:
    """CUDA or ROCm version and commit of the installed torch, from its own file; importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    return ", ".join(f"{name} {value[:12]}" for name, value in _TORCH_BUILD.findall(text)) or None


def _processor() -> str | None:
    """The model's name; the same library picks other instructions on another model."""
    return _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or None


def _field(path: Path, name: str) -> str | None:
    """The value in the first line of ``path`` that begins with ``name``."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next((value for value in values if value), None)


def _gpus_by_program() -> list[str]:
    # "GPU 0: NVIDIA H200 (UUID: GPU-...)": the serial number says nothing about a result.
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_GPU_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    return re.findall(r"^[^:\n]*: *(.+?) *(?: \(UUID.*)?$", done.stdout, re.MULTILINE)


# Noting an attempt takes milliseconds.
PATIENCE_SECONDS = 20.0


def run_hash(config: RunConfig, corpus: Mapping[str, str] | None = None) -> str:
    """Over what a run's configuration can change and what its ``corpus_record`` says: equal on any machine."""
    return sha256_of_json([config.config_hash, corpus or corpus_record(config)])


def begin_run(
    config: RunConfig,
    *,
    command: str,
    prepare: Callable[[RunPaths], Mapping[str, object]] | None = None,
    state: RunState = "running",
    chosen: str = "",
    submits: bool = False,
) -> RunPaths:
    """Create a run folder with its record, parameters, patch of the code and first status.

    ``command`` is what was typed, ``state`` what the status says until somebody works on it. ``prepare`` is called with
    the new folder before it counts as a run, and what it returns is recorded as well. ``chosen`` says why a parameter
    that was asked for as ``auto`` has its value. ``submits``: the work is left to jobs.

    Raises:
        UsageError: the experiment's name is not one folder name.
        OSError: the runs folder cannot be written.
    """
    corpus = corpus_record(config)
    digest = run_hash(config, corpus)
    run = new_run(Path(config.runs_dir), config.experiment, digest)
    write_text(run.params_yaml, config.to_yaml())
    network = DETECTORS.file_of(config.model)
    if network is not None and network.is_file():  # what was trained can be read where the run is, too
        write_bytes(run.networks / network.name, network.read_bytes())
    RunStatus(run_id=run.run_id, state=state, started_utc=utc_now()).write(run)
    prepared = {} if prepare is None else prepare(run)
    code = code_state()
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
        **({"chosen": chosen} if chosen else {}),
        "contents": content_chosen(config),
        "repeat": repeat_commands(code, run.params_yaml, run.code_patch, command=needed),
        **prepared,
        "attempts": [_attempt(command, code, submits)],
    }
    # Last: a folder without run.json is a run that never began, and is listed nowhere.
    write_document(run.run_json, record)
    return run


def record_resumption(run: RunPaths, config: RunConfig, *, command: str, submits: bool = False) -> list[str]:
    """Add an attempt to ``run.json``, and keep what it changed (memory, device, workers) in ``params.yaml``.

    Where versions, processor or threads differ from the last attempt that worked, the attempt's ``differs`` holds
    ``{name: [before, now]}`` and the record no longer claims that the resumed run is bit for bit the undisturbed one:
    ``bit_equal_resume`` is false, for good, with every reason in ``bit_equal_resume_because``. Another commit or patch
    stands in ``code_differs``; a new patch lies beside the first one. An attempt that only ``submits`` jobs computes
    nothing: its machine is compared with no other.

    Several jobs may do this at once, on several hosts.

    Returns:
        The differences, one readable clause each; for a warning.

    Raises:
        DataError: ``run.json`` is not readable, or another process has been holding it for too long.
    """
    code = code_state()
    now = _attempt(command, code, submits)
    last_attempt(run)
    with _record_held(run):
        try:
            record = _read(run)
            clauses = _note_differences(record, now)
            record["attempts"].append(now)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(f"{run.run_json}: not a run's record: {error!r}. Start a new run.") from error
        if "code_differs" in now and code.patch:
            write_bytes(_patch_path(run, code), code.patch)
        # Whichever of the two files a kill leaves is accepted.
        digest = hashlib.sha256(config.to_yaml().encode("utf-8", "surrogateescape")).hexdigest()
        write_document(run.run_json, {**record, "params_sha256": [digest, content_hash(run.params_yaml)]})
        write_text(run.params_yaml, config.to_yaml())
    return clauses


def _read(run: RunPaths) -> dict[str, Any]:
    """``run.json``; ``DataError`` where it is damaged."""
    record: dict[str, Any] = json.loads(run.run_json.read_bytes())
    if damage := document_damage(run.run_json, record):
        raise DataError(f"{damage} Or begin a new run.")
    return record


def record_corpus(run: RunPaths) -> None:
    """Add to ``run.json`` what the run's index says of the corpus; a record that cannot be read stays as it is."""
    with contextlib.suppress(OSError, ValueError, DataError), _record_held(run):
        record = _read(run)
        corpus = record.get("corpus", {}) | _indexed(run)
        if corpus != record.get("corpus", {}):
            write_document(run.run_json, {**record, "corpus": corpus})


def _indexed(run: RunPaths) -> dict[str, object]:
    """``fingerprint``, over the contents of the files in the run's index, whatever they are called, and their number.

    Of videos also ``corpora``: what the corpora that they are from are called.

    Nothing where there is no index yet, or one of annotations only.
    """
    import polars as pl

    for path in (run.index, run.images, run.video_texts):
        with contextlib.suppress(OSError, DataError, pl.exceptions.PolarsError):  # missing or damaged
            with undamaged_file(path) as stream:
                table = pl.scan_parquet(stream).select(pl.col("^(content_sha256|corpus)$")).collect()
            contents = sorted(set(table["content_sha256"]))
            names = {"corpora": sorted(set(table["corpus"]))} if "corpus" in table.columns else {}
            return {"fingerprint": sha256_of_json(contents), "num_contents": len(contents)} | names if contents else {}
    return {}


def last_attempt(run: RunPaths) -> dict[str, Any]:
    """What ``run.json`` holds of the last attempt.

    Raises:
        DataError: it is not readable.
    """
    try:
        attempt: dict[str, Any] = _read(run)["attempts"][-1]
        bits_depend_on(attempt)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{run.run_json}: not a run's record: {error!r}. Start a new run.") from error
    return attempt


def _note_differences(record: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Write the differences between attempts into both; return those that the bits depend on, in words.

    The code is compared with the last attempt's, the machine with that of the last attempt that worked.
    """
    last = record["attempts"][-1]
    worked = [each for each in record["attempts"] if not each.get("submits")]
    before = bits_depend_on(worked[-1]) if worked and not now["submits"] else {}
    then = bits_depend_on(now)
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


def _attempt(command: str, code: CodeState, submits: bool) -> dict[str, object]:
    """When, how, with which code and on what machine an attempt began; ``submits``: it leaves the work to jobs."""
    return {
        "started_utc": utc_now(),
        "command": command,
        "submits": submits,
        "code": code.record(),
        "versions": versions(),
        "hardware": hardware(),
        "slurm": slurm_job(),
    }


def _patch_path(run: RunPaths, code: CodeState) -> Path:
    return run.code_patch.with_name(f"{run.code_patch.stem}_{(code.patch_sha256 or '')[:8]}{run.code_patch.suffix}")


@contextmanager
def _record_held(run: RunPaths) -> Iterator[None]:
    """Hold ``run.json`` against other processes.

    Raises:
        DataError: another process has held it for ``PATIENCE_SECONDS``.
    """
    lock = FileLock(run.run_json.with_name("run.json.lock"), timeout=PATIENCE_SECONDS, poll_interval=0.02)
    try:
        lock.acquire()
    except Timeout as error:
        raise DataError(
            f"{run.run_json}: another process has been writing it for {PATIENCE_SECONDS:.0f} s. If its host is down, "
            f"delete {error.lock_file}."
        ) from error
    try:
        yield
    finally:
        lock.release()
