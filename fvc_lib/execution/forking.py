"""A new run begun from another under a changed configuration: what still holds is copied, the rest begins anew.

The run it comes from is only read. A half-done training goes on from its checkpoint when nothing changed that says what
its network is or which videos it has seen; the engine compares the data once more before it uses the weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvc_lib.execution.plan import PlannedTask
from fvc_lib.execution.stages import Task
from fvc_lib.execution.status import read_status
from fvc_lib.execution.superseding import trained_by_this_code, written_by
from fvc_lib.services.atomic_files import atomic_output, sha256_of_file, write_json
from fvc_lib.services.run_paths import RunPaths

# Beside a checkpoint: whose it is. The same name stands in services.checkpoints, which may not be imported here: this
# room must not load torch.
FORK_NOTE = "forked_from.json"
LATEST = "latest_checkpoint.pt"
_CHECKPOINTS = (LATEST, "checkpoint_epoch_*.pt")
# With one of these changed, weights fit no network of the new run, have seen what is now kept from them, or have come
# to a place that the new order of training does not have.
STARTS_ANEW = frozenset(
    {
        "corpus", "near_duplicate_bits", "seed", "num_folds", "inner_validation_share",
        "num_frames", "fixed_size", "augmentations_per_video", "augmentations", "augmentation_strength", "model",
        "effective_batch_size", "class_balance", "shuffle_labels",
        "split_validation_share", "split_test_share",
        "image_layout", "image_size", "targets", "dev_samples_per_class", "backbone", "backbone_weights",
        "manifest_separator", "max_text_tokens", "vocabulary_size", "text_encoder", "embedding_size", "text_width",
        "text_layers", "text_heads", "contrastive_loss", "contrastive_weight", "caption_weight", "masked_weight",
    }
)  # fmt: skip

Change = tuple[object, object]


@dataclass(frozen=True)
class Inheritance:
    """What a fork takes over.

    Attributes:
        kept: finished tasks that still hold, copied with all they wrote.
        carried: trainings that go on from the checkpoint they had come to.
        anew: other tasks, each with the reason.
    """

    kept: tuple[Task, ...]
    carried: tuple[Task, ...]
    anew: tuple[tuple[Task, str], ...]

    def lines(self) -> list[str]:
        """For the terminal: what becomes of each task."""
        kept = ", ".join(task.key for task in self.kept) or "nothing"
        carried = [f"  {task.key:<28} goes on from its checkpoint" for task in self.carried]
        return [f"  kept: {kept}", *carried, *(f"  {task.key:<28} starts anew: {why}" for task, why in self.anew)]


def inheritance(ancestor: RunPaths, plan: Sequence[PlannedTask], changed: Mapping[str, Change]) -> Inheritance:
    """What a fork of ``ancestor`` would take over; nothing is written.

    Args:
        ancestor: the run to fork.
        plan: made for ``ancestor`` under the new configuration, without any stage asked for by name.
        changed: the parameters that differ, (old, new) by name.
    """
    stale = {planned.task.stage.name for planned in plan if planned.run}
    kept = tuple(planned.task for planned in plan if not planned.run)
    carried, anew = [], []
    for planned in plan:
        task = planned.task
        if not planned.run:
            continue
        folder = ancestor.training_checkpoints(task.stage.name, task.fold)
        obstacle = _obstacle(folder, task, stale, changed) if task.stage.trains else ""
        if task.stage.trains and not obstacle:
            carried.append(task)
        else:
            anew.append((task, "; ".join(filter(None, (planned.reason, obstacle)))))
    return Inheritance(kept, tuple(carried), tuple(anew))


def take_over(
    ancestor: RunPaths, fork: RunPaths, taken: Inheritance, binding_config: Callable[[Task], Mapping[str, Any]]
) -> None:
    """Copy into the new folder ``fork`` what it takes over from ``ancestor``.

    Args:
        ancestor: the run that is forked; only read.
        fork: the new run, in which nothing has run.
        taken: what ``inheritance`` found.
        binding_config: the configuration that the checkpoints of a task of ``ancestor`` are bound to.

    Raises:
        OSError: something cannot be read or written.
    """
    before, status = read_status(ancestor), read_status(fork)
    for task in taken.kept:
        for path in written_by(ancestor, task):
            _copy(path, fork.root / path.relative_to(ancestor.root))
        if task.key in before.stages:
            status.stages[task.key] = before.stages[task.key]
    for task in taken.carried:
        _carry_training(ancestor, fork, task, binding_config(task))
        metrics = ancestor.metrics(task.stage.name, task.fold)
        _copy(metrics, fork.metrics(task.stage.name, task.fold))
        # Attempts go on counting: of two lines of one step in the metric log the later attempt's counts.
        status.stage(task.key).attempts = before.stage(task.key).attempts
    status.write(fork)


def _obstacle(folder: Path, task: Task, stale: set[str], changed: Mapping[str, Change]) -> str:
    """Why the fold's training cannot go on from ``folder``; empty when it can."""
    if not _checkpoints(folder):
        return "it had no checkpoint yet"
    if stale.intersection(task.stage.needs):
        return "its weights come from other data"
    if hindering := sorted(STARTS_ANEW.intersection(changed)):
        return f"weights do not outlast another {' or '.join(hindering)}"
    if not trained_by_this_code(folder, task):
        return "its checkpoint was made by other code"
    return ""


def _carry_training(ancestor: RunPaths, fork: RunPaths, task: Task, config: Mapping[str, Any]) -> None:
    """The checkpoints of the model and of a fold's control, each with a note whose they are."""
    source, target = (run.training_checkpoints(task.stage.name, task.fold) for run in (ancestor, fork))
    _copy(source / "code.json", target / "code.json")
    note = {"run_id": ancestor.run_id, "config": dict(config)}
    _carry_checkpoints(source, target, note)
    if task.fold is not None:
        _carry_checkpoints(ancestor.control_checkpoints(task.fold), fork.control_checkpoints(task.fold), note)


def _carry_checkpoints(source: Path, target: Path, note: Mapping[str, Any]) -> None:
    """Copy checkpoints that are all bound alike; in a fork of a fork some may still be the first run's."""
    hashes = {path.name: sha256_of_file(path) for path in _checkpoints(source)}
    earlier = _read_note(source / FORK_NOTE)
    untouched = {name for name, digest in hashes.items() if earlier.get("files", {}).get(name) == digest}
    if untouched == hashes.keys():
        note = {"run_id": earlier.get("run_id"), "config": earlier.get("config")} if untouched else note
    else:
        hashes = {name: digest for name, digest in hashes.items() if name not in untouched}
    for name in hashes:
        for path in (source / name, source / f"{name}.sha256"):
            _copy(path, target / path.name)
    if hashes:
        write_json(target / FORK_NOTE, {**note, "files": hashes})


def _read_note(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for pattern in _CHECKPOINTS for path in folder.glob(pattern))


def _copy(source: Path, target: Path) -> None:
    """Copy a file or all files of a folder, where there are any; what a killed writer left half-written stays."""
    for path in _files(source):
        with atomic_output(target / path.relative_to(source)) as temporary:
            shutil.copyfile(path, temporary)


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from (each for each in sorted(path.rglob("*")) if each.is_file() and not each.name.endswith(".tmp"))
