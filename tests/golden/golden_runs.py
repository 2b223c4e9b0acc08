"""Run FVC's command and reduce what it wrote to facts that can be compared with those of an earlier version.

Nothing here imports the library: a golden run sees what a user sees, the command and the run folder.
"""

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars as pl
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
EXPECTED = Path(__file__).parent / "expected"
DEMO = ("--params", "params/demo.yaml", "-p", "num_folds", "2")
RUNS: Mapping[str, tuple[str, ...]] = {
    "demo": (*DEMO, "-p", "epochs", "2"),
    "image": ("--params", "params/image.yaml", "-p", "epochs", "2"),
    "video_text": ("--params", "params/video_text.yaml", "-p", "epochs", "2"),
    "forensic": (*DEMO, "-p", "model", "forensic_logistic", "--experiment", "forensic"),
    "frozen": (*DEMO, "-p", "epochs", "2", "-p", "model", "efficientnet_lite0", "-p", "fixed_size", "0", "--experiment",
               "frozen"),
    "probe": (*DEMO, "-p", "model", "probe:efficientnet_lite0", "-p", "fixed_size", "0", "--experiment", "probe"),
}  # fmt: skip
TABLES = (
    "index", "folds", "protocol", "predictions_fold_*", "validation_predictions_fold_*", "features", "images",
    "image_targets", "image_predictions", "target_predictions", "video_texts", "captions", "retrieval_ranks",
)  # fmt: skip
# On a machine without values of its own, trainings diverge: rounding differs, and each step amplifies it.
TOLERANCE = 0.1  # relative, of a sum of floats
MEASURED, MEASURED_TOLERANCE = "/features", 1e-4  # forensic features, which nothing amplifies
LEARNED = ("features", "metrics", "weights", "predictions", "validation", "image_pred", "target_pred", "captions",
           "retrieval", "kfold_results", "task_results", "numbers", "scores", "auc")  # fmt: skip


def machine() -> str:
    """Return what bit-equality depends on: the processor, and the versions of torch and PyAV.

    Processors of several families have one name, such as AMD EPYC.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    processor = " ".join(facts[name] for name in ("model name", "cpu family", "model") if name in facts)
    return f"{processor or platform.processor()}, torch {version('torch')}, av {version('av')}"


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a run whose folders all lie in ``folder``."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("FVC_", "OMP_"))}
    places = {"FVC_RUNS_DIR": "runs", "FVC_CACHE_DIR": "cache", "FVC_DATA_DIR": "data"}
    return inherited | {name: str(folder / place) for name, place in places.items()}


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start ``run_notebooks.py`` from the project's root, with further environment variables."""
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "run_notebooks.py", *arguments], cwd=ROOT, env=environment(folder) | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run(folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Return the exit code of a command and what it printed."""
    process = start(folder, *arguments, **variables)
    shown, _ = process.communicate(timeout=1800)
    return process.returncode, shown


def run_folder(folder: Path, experiment: str) -> Path:
    """Return the newest run of ``experiment``."""
    return max((folder / "runs" / experiment).glob("run_*"))


def facts_of_run(run: Path) -> dict[str, Any]:
    """Return the facts of a finished run: its tables by column, its measured metrics, its trained weights."""
    facts: dict[str, Any] = {}
    paths = [path for pattern in TABLES for path in sorted((run / "tables").glob(f"{pattern}.parquet"))]
    for path in [*paths, *sorted(run.glob("*_results.feather"))]:
        frame = pl.read_parquet(path) if path.suffix == ".parquet" else pl.read_ipc(path.read_bytes())
        # Digests and sums of the columns, with the rows in the order of their texts and whole numbers.
        keys = [name for name, kind in frame.schema.items() if kind in (pl.String, pl.Int64, pl.Boolean)]
        frame = frame.sort(keys, nulls_last=True) if keys else frame
        facts[path.stem] = {name: numbers_of(frame[name].to_list()) for name in frame.columns}
    for path in sorted((run / "metrics").glob("*training*.jsonl")) + sorted((run / "metrics").glob("[12]0_*.jsonl")):
        facts[f"metrics {path.stem}"] = metrics_of(path)
    for path in sorted((run / "checkpoints").rglob("best_model.safetensors")):
        tensors = load_file(path)
        name = path.relative_to(run / "checkpoints").parent
        facts[f"weights {name}"] = {key: numbers_of(tensors[key].ravel().tolist()) for key in sorted(tensors)}
    return facts


def numbers_of(values: Sequence[Any]) -> list[Any]:
    """Return the digest of ``values``, how many are not null, and for floats their sum."""
    text = json.dumps(values, default=str)
    known = [value for value in values if value is not None]
    is_float = bool(known) and all(isinstance(value, float) for value in known)
    return [hashlib.sha256(text.encode()).hexdigest()[:16], len(known), *([sum(known)] if is_float else [])]


def metrics_of(path: Path) -> dict[str, Any]:
    """Return the values of a metric log by phase and metric, without times and sizes."""
    values: dict[str, list[Any]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if not any(word in row["metric"] for word in ("seconds", "bytes", "per_second", "memory", "micro_batch")):
            values.setdefault(f"{row['phase']} {row['metric']}", []).append(row["value"])
    return {name: numbers_of(values[name]) for name in sorted(values)}


def differences(found: Any, wanted: Any, exact: bool, place: str = "") -> list[str]:
    """Return where ``found`` differs from ``wanted``.

    Not ``exact``, sums of floats may differ by ``TOLERANCE``, and other columns that a network decides need only be as
    long.
    """
    if isinstance(wanted, dict):
        names = sorted(set(found) | set(wanted))
        missing = [f"{place}/{name}: only in one of both" for name in names if (name in found) != (name in wanted)]
        both = [name for name in names if name in found and name in wanted]
        return missing + [
            text for name in both for text in differences(found[name], wanted[name], exact, f"{place}/{name}")
        ]
    if found == wanted or (
        not exact
        and place.startswith(tuple(f"/{name}" for name in LEARNED))
        and near(found, wanted, MEASURED_TOLERANCE if place.startswith(MEASURED) else TOLERANCE)
    ):
        return []
    return [f"{place}: {found} instead of {wanted}"]


def near(found: Any, wanted: Any, tolerance: float) -> bool:
    """Return whether two results of a training are alike: as many values, of sums or numbers within ``tolerance``."""
    if isinstance(wanted[0], str) and len(wanted) > 1 and isinstance(wanted[1], int):  # digest, count and maybe a sum
        if len(found) != len(wanted) or found[1] != wanted[1]:
            return False
        if len(wanted) < 3 or math.isinf(wanted[2]):
            return len(wanted) < 3 or bool(found[2] == wanted[2])
        return abs(found[2] - wanted[2]) <= tolerance * max(1.0, abs(wanted[2]), wanted[1])
    pairs = zip(found, wanted, strict=True)
    return all(one == other or abs(float(one) - float(other)) <= tolerance for one, other in pairs)


def compare(name: str, facts: Mapping[str, Any]) -> list[str]:
    """Return where ``facts`` differ from those expected on this machine, or else on another one.

    With FVC_GOLDEN=write, expect ``facts`` on this machine from now on.
    """
    path = EXPECTED / f"{name}.json"
    expected: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}
    if os.environ.get("FVC_GOLDEN") == "write":
        expected[machine()] = dict(facts)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(expected, indent=0, sort_keys=True) + "\n")
        return []
    own = expected.get(machine())
    other = next(iter(expected.values()))
    return differences(dict(facts), other if own is None else own, own is not None)
