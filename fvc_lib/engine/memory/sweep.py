"""Which batch sizes and resolutions fit the machine at hand and what an epoch takes: two tables, measured.

Every row is a process of its own that trains a few steps and may die of it: memory that ends is a result.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import torch

from fvc_lib.engine.device import Precision, deterministic_algorithms
from fvc_lib.engine.loading import batches_per_epoch, load_batches
from fvc_lib.engine.memory.preflight import (
    Footprint,
    StepMeasurement,
    StepProbe,
    StepRequest,
    circumstances,
    ended_by_memory,
    estimate,
    footprint_of,
    limit_to_budget,
    measured_in_child,
    predicted_peak,
    reserved_bytes,
    room_to_measure,
    volunteer_to_be_killed,
)
from fvc_lib.engine.step import BatchTransaction, Stepper, recompute_activations
from fvc_lib.services.atomic_files import sha256_of_json, write_json
from fvc_lib.services.errors import FvcError, StoppedError, UsageError
from fvc_lib.services.memory_budget import MemoryBudget
from fvc_lib.services.tables import MEASURED_FITS, check_table

# ----------------------------------------------------------------------------------------------------
# What was measured of batch sizes and resolutions as a table, and what to take according to it.


_NEARLY = 1.05  # a larger batch that is faster by less than this is not worth its memory


@dataclass(frozen=True)
class FitRow:
    """One row of ``task_tables.MEASURED_FITS``."""

    varied: str
    batch_size: int
    image_size: int
    fits: bool | None
    peak_bytes: int | None
    seconds_per_epoch: float | None
    device: str
    detail: str


@dataclass(frozen=True)
class Recommendation:
    """A setting for this machine.

    Attributes:
        batch_size: images at once; None: none that was tried fits.
        image_size: pixels; the one that was asked for where it fits, else the largest that does.
        largest_image_size: the largest resolution that was tried and fits.
        sentence: the recommendation with its numbers.
    """

    batch_size: int | None
    image_size: int | None
    largest_image_size: int | None
    sentence: str


def fits_table(rows: Iterable[FitRow]) -> pl.DataFrame:
    """``rows`` in the schema of ``MEASURED_FITS``; without any, an empty table."""
    schema = {name: column.dtype.type for name, column in MEASURED_FITS.columns.items()}
    frame = pl.DataFrame([asdict(row) for row in rows], schema=schema, orient="row")
    return check_table(frame, MEASURED_FITS, "measured fits")


def recommended(fits: pl.DataFrame) -> Recommendation:
    """The fastest batch size that fits at the resolution asked for, and how far the resolution can go.

    Of batch sizes within 5 % of the fastest the smallest, because memory that is not needed is room for everything
    else. The batch size changes time and memory and not the result: the effective batch stays the same.
    """
    if fits.is_empty():
        return Recommendation(None, None, None, "Nothing was measured, so nothing is recommended.")
    by_batch, by_size = (_fitting(fits, varied) for varied in ("batch_size", "image_size"))
    largest = by_size["image_size"].max() if by_size.height else None
    largest_size = largest if isinstance(largest, int) else None
    if by_batch.height:
        return _of_batch_size(by_batch, by_size, largest_size)
    if largest_size is not None:
        row = by_size.filter(pl.col("image_size") == largest_size).row(0, named=True)
        sentence = (
            f"At the resolution asked for nothing that was tried fits. Take image_size {largest_size} with batch_size "
            f"{row['batch_size']}: {_cost(row)}."
        )
        return Recommendation(int(row["batch_size"]), largest_size, largest_size, sentence)
    if fits["fits"].is_null().all():
        return Recommendation(None, None, None, f"Nothing could be measured: {fits['detail'][0]}.")
    return Recommendation(
        None, None, None, "Nothing that was tried fits: lower image_size, turn gradient_checkpointing on, or give the "
        "run more memory.",
    )  # fmt: skip


def _of_batch_size(by_batch: pl.DataFrame, by_size: pl.DataFrame, largest_size: int | None) -> Recommendation:
    fastest = by_batch["seconds_per_epoch"].min()
    row = by_batch.filter(pl.col("seconds_per_epoch") <= fastest * _NEARLY).sort("batch_size").row(0, named=True)  # type: ignore[operator]
    sentence = (
        f"Take batch_size {row['batch_size']} at {row['image_size']} pixels: {_cost(row)}, of those that fit the "
        "fastest within 5 % and the smallest. The effective batch, and so the result, stays the same."
    )
    if largest_size is not None and largest_size > row["image_size"]:
        limit = by_size.filter(pl.col("image_size") == largest_size).row(0, named=True)
        sentence += (
            f" Up to {largest_size} pixels were found to fit with batch_size {limit['batch_size']}: {_cost(limit)}."
        )
    return Recommendation(int(row["batch_size"]), int(row["image_size"]), largest_size, sentence)


def _fitting(fits: pl.DataFrame, varied: str) -> pl.DataFrame:
    return fits.filter((pl.col("varied") == varied) & pl.col("fits").fill_null(False))


def _cost(row: dict[str, object]) -> str:
    return f"{row['seconds_per_epoch']:.3g} s per epoch, predicted peak {float(str(row['peak_bytes'])) / 1e9:.2f} GB"


BATCH_SIZES = (4, 8, 16, 24, 32)
IMAGE_SIZES = (112, 160, 224, 384, 512, 1024)
ROW_SECONDS = 40.0
_MEASURE = "fvc_lib.engine.memory.sweep:measure"
_DEADLINE_ROWS = 4  # a row may take so many times what it was expected to, on a machine that does other things as well
_FORMAT = 2

MakeRequest = Callable[[int, int], StepRequest]
Keep = Callable[[StepRequest, StepMeasurement], None]


@dataclass(frozen=True)
class _Finding:
    """What one row's process found; the times as of ``measured_fits_row.TimedStep``."""

    found: StepMeasurement
    step_seconds: float | None
    own_step_seconds: float | None = None
    problem: str = ""


def measure_fits(
    make_request: MakeRequest,
    *,
    batch_size: int,
    image_size: int,
    num_samples: int,
    budget: MemoryBudget,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    image_sizes: Sequence[int] = IMAGE_SIZES,
    loading_seconds: float = 0.0,
    store: Path | None = None,
    row_seconds: float = ROW_SECONDS,
    keep: Keep | None = None,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> pl.DataFrame:
    """Train a few steps with each batch size at ``image_size`` pixels, and at each resolution with ``batch_size``.

    Takes from five seconds per row. A row is not tried, and says so, where it is larger than one that did not fit, is
    expected to compute for more than ``row_seconds`` (but what is asked for, and all that is smaller, is always tried),
    or where to measure it beside this process would take more than the budget. An epoch's time is that of its steps,
    each as long as a full effective batch takes after two steps to warm up, and of loading; validation is not in it.

    Args:
        make_request: ``make_request(batch_size, image_size)``, a step with so many images at once, of which there must
            be enough; ``made_up_images.requests_on_made_up_images`` makes one.
        batch_size: of the rows that vary the resolution.
        image_size: in pixels, of the rows that vary the batch size.
        num_samples: of the training part.
        budget: on CUDA the device's memory, elsewhere main memory.
        batch_sizes: to try, and
        image_sizes: to try, in pixels; in any order.
        loading_seconds: for one sample of the real data in one process (``seconds_per_sample``).
        store: JSON file that keeps what was measured; None: keep nothing.
        row_seconds: most that a row may be expected to compute for, with nothing else at work on the machine.
        keep: told what was found of each row that was tried or looked up.
        progress: called with (rows done, rows).
        stop: asked before each row.

    Returns:
        ``task_tables.MEASURED_FITS``, first the batch sizes, then the resolutions, each ascending. ``fits`` is whether
        the predicted peak of a training in this process, with its loader processes and what it needs after training, is
        within the budget; false also where memory ended. ``peak_bytes`` is that peak.

    Raises:
        StoppedError: ``stop`` said so; what was measured stands in ``store``.
        UsageError: the device is not there, or a request takes fewer images at once than its row says.
    """
    tables = (
        [("batch_size", size, image_size) for size in sorted(set(batch_sizes))],
        [("image_size", batch_size, size) for size in sorted(set(image_sizes))],
    )
    asked_pixels = batch_size * image_size**2
    measuring = _Measuring(
        make_request, budget, num_samples, loading_seconds, _FitStore(store), row_seconds, asked_pixels, keep
    )
    rows: list[FitRow] = []
    count = sum(map(len, tables))
    for table in tables:
        for row in measuring.rows(table, stop or (lambda: False)):
            rows.append(row)
            if progress is not None:
                progress(len(rows), count)
    return fits_table(rows)


def seconds_per_sample(data: Any, num_samples: int = 16) -> float:
    """How long one sample of ``data`` (a ``SampleSet``) takes to load here, over so many spread evenly."""
    count = min(num_samples, len(data))
    if not count:
        return 0.0
    begun = time.perf_counter()
    for number in range(count):
        data[number * len(data) // count]
    return (time.perf_counter() - begun) / count


class _Measuring:
    """Goes through the rows of one table after the other; what two tables have in common is measured once."""

    def __init__(
        self,
        make_request: MakeRequest,
        budget: MemoryBudget,
        num_samples: int,
        loading_seconds: float,
        store: _FitStore,
        row_seconds: float,
        asked_pixels: int,
        keep: Keep | None,
    ) -> None:
        self._make_request = make_request
        self._budget = budget
        self._num_samples = num_samples
        self._loading_seconds = loading_seconds
        self._store = store
        self._row_seconds = row_seconds
        self._asked_pixels = asked_pixels
        self._keep = keep or (lambda request, found: None)
        self._step_bytes: dict[int, int] = {}  # by pixels, as measured; and all that was found with the last of them
        self._like = StepMeasurement()
        self._done: dict[tuple[int, int], tuple[FitRow, float]] = {}
        self._baseline_bytes = _resident_bytes()
        self._before: Footprint | None = None

    def rows(self, table: Sequence[tuple[str, int, int]], stop: Callable[[], bool]) -> Iterator[FitRow]:
        """One table, ascending. A row that does not fit or takes too long ends the trying."""
        reason = ""
        expected: tuple[int, float] | None = None  # pixels and seconds of the row before
        for varied, batch_size, image_size in table:
            if stop():
                raise StoppedError("stopped as asked between two rows of the table of fits; run it again to go on.")
            request = self._request(batch_size, image_size)
            pixels, sizes = batch_size * image_size**2, (batch_size, image_size)
            seconds = expected[1] * pixels / expected[0] if expected is not None and sizes not in self._done else 0.0
            too_long = f"it would take about {seconds:.0f} s to find out, more than {self._row_seconds:.0f} s"
            if reason or (seconds > self._row_seconds and pixels > self._asked_pixels):
                device = request.compute.describe()
                yield FitRow(varied, *sizes, None, None, None, device, f"not tried: {reason or too_long}")
                continue
            if sizes not in self._done:
                self._done[sizes] = self._tried(request, varied, *sizes)
            row, computing_seconds = self._done[sizes]
            expected = (pixels, computing_seconds) if computing_seconds else expected
            if row.fits is False:
                what = f"{batch_size} images at once" if varied == "batch_size" else f"{image_size} pixels"
                reason = f"{what} did not fit already"
            yield replace(row, varied=varied)

    def _request(self, batch_size: int, image_size: int) -> StepRequest:
        request = self._make_request(batch_size, image_size)
        if request.largest_micro_batch != batch_size:
            raise UsageError(
                f"measuring what fits: got a step with {request.largest_micro_batch} images at once, wanted "
                f"{batch_size}. Its effective batch and its training data must have at least as many."
            )
        return request

    def _tried(self, request: StepRequest, varied: str, batch_size: int, image_size: int) -> tuple[FitRow, float]:
        """The row, and the seconds that its steps took without the process around them."""
        budget_bytes, footprint = self._budget.total_bytes, self._footprint(request)
        row = FitRow(varied, batch_size, image_size, None, None, None, request.compute.describe(), "")
        pixels = batch_size * image_size**2
        kept = self._store.get(_key(request, budget_bytes))
        if kept is None:
            expected = estimate(self._step_bytes, pixels) or 0
            held = replace(footprint, resident_bytes=max(footprint.resident_bytes, _resident_bytes()))
            if not room_to_measure(request, held, budget_bytes - expected):
                return self._without_room(row, footprint, expected), 0.0
        finding = kept or self._newly_measured(request, footprint, budget_bytes)
        self._keep(request, finding.found)
        if batch_size in finding.found.step_bytes:
            self._step_bytes[pixels], self._like = finding.found.step_bytes[batch_size], finding.found
        if batch_size in finding.found.failures:
            return replace(row, fits=False, detail=f"memory ended: {finding.found.failures[batch_size]}"), 0.0
        peak = predicted_peak(finding.found, footprint, batch_size)
        if peak is None or finding.step_seconds is None:
            return replace(row, detail=f"could not be measured: {finding.problem}"), 0.0
        needed = peak + reserved_bytes(finding.found, footprint)
        row = replace(
            row, fits=needed <= budget_bytes, peak_bytes=peak, seconds_per_epoch=self._epoch_seconds(request, finding)
        )
        if not row.fits:
            row = replace(row, detail=f"{needed / 1e9:.2f} GB are needed, more than {_budget_text(self._budget)}")
        shown = min(1.0, 2 * batch_size / request.window_size)  # of an effective batch, what the process computes
        return row, 3 * shown * (finding.own_step_seconds or finding.step_seconds)

    def _without_room(self, row: FitRow, footprint: Footprint, expected_bytes: int) -> FitRow:
        """Told from smaller rows that it does not fit, where there were some; else nothing is known of it."""
        like = replace(self._like, step_bytes={row.batch_size: expected_bytes})
        peak = predicted_peak(like, footprint, row.batch_size) or 0
        needed = peak + reserved_bytes(like, footprint)
        if len(self._step_bytes) > 1 and needed > self._budget.total_bytes:
            detail = f"not tried: about {needed / 1e9:.2f} GB are needed, more than {_budget_text(self._budget)}"
            return replace(row, fits=False, peak_bytes=peak, detail=detail)
        return replace(row, detail=f"{_budget_text(self._budget)} has no room for a process that measures")

    def _footprint(self, request: StepRequest) -> Footprint:
        """This process as it was before the first row.

        To know a row again its model is looked at, and that loads into this process what its first training loads in
        any case: 79 MB. Later rows that took them for loaded, but not for held, came out 76 MB below the first.
        """
        now = footprint_of(request, self._baseline_bytes)
        self._before = self._before or now
        return replace(now, resident_bytes=self._before.resident_bytes, trained_before=self._before.trained_before)

    def _epoch_seconds(self, request: StepRequest, finding: _Finding) -> float:
        """Computing and loading, one after the other where there are no loader processes, else at the same time."""
        step_seconds = finding.step_seconds or 0.0
        whole, rest = divmod(self._num_samples, request.effective_batch_size)
        computing = step_seconds * (whole + rest / request.effective_batch_size)
        loading = self._loading_seconds * self._num_samples
        workers = min(request.num_workers, batches_per_epoch(self._num_samples, request.effective_batch_size))
        return max(computing, loading / workers) if workers else computing + loading

    def _newly_measured(self, request: StepRequest, footprint: Footprint, budget_bytes: int) -> _Finding:
        finding = _measured(request, footprint, budget_bytes, _DEADLINE_ROWS * self._row_seconds)
        if not finding.problem:
            self._store.keep(_key(request, budget_bytes), finding)
        return finding


def _measured(request: StepRequest, footprint: Footprint, budget_bytes: int, time_limit_seconds: float) -> _Finding:
    try:
        answer, document = measured_in_child(_MEASURE, request, footprint, budget_bytes, time_limit_seconds)
    except FvcError as error:
        return _Finding(StepMeasurement(), None, problem=str(error))
    if document is None:
        return _Finding(StepMeasurement(), None, problem=answer.detail)
    found = StepMeasurement.from_document(document["found"])
    if answer.failure is None:
        return _Finding(found, document["step_seconds"], document["own_step_seconds"])
    if ended_by_memory(answer) and found.attempting:
        return _Finding(found.with_failure(found.attempting, f"the process died of it ({answer.detail})"), None)
    return _Finding(found, None, problem=answer.detail)


class _FitStore:
    """What was measured, by the hash of all that it depends on. A file that cannot be used costs measurements."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def get(self, key: str) -> _Finding | None:
        """None: not known."""
        entry = self._read().get(key)
        try:
            return None if entry is None else _Finding(StepMeasurement.from_document(entry[0]), entry[1], entry[2])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            return None

    def keep(self, key: str, finding: _Finding) -> None:
        """Atomically."""
        if self._path is not None:
            rows = {**self._read(), key: [finding.found.to_document(), finding.step_seconds, finding.own_step_seconds]}
            write_json(self._path, {"format": _FORMAT, "rows": rows})

    def _read(self) -> dict[str, Any]:
        try:
            document = json.loads(self._path.read_text(encoding="utf-8")) if self._path is not None else None
        except (OSError, ValueError):
            return {}
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            return {}
        rows = document.get("rows")
        return rows if isinstance(rows, dict) else {}


def _key(request: StepRequest, budget_bytes: int) -> str:
    return sha256_of_json([circumstances(request), request.micro_batch, budget_bytes, request.num_workers])


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _budget_text(budget: MemoryBudget) -> str:
    return f"the budget of {budget.total_bytes / 1e9:.2f} GB ({budget.origin})"


# ----------------------------------------------------------------------------------------------------
# The child process behind one row of the tables of fits: what a step of this size takes in memory and in time.
#
# It trains as the engine does, and may die instead of the training.
#


_TIMED_SECONDS = 1.0
_MOST_TIMED_STEPS = 5


def measure(item: Mapping[str, Any]) -> None:
    """Measure steps with ``largest_micro_batch``, writing ``found`` and both times of a ``TimedStep`` to
    ``item["findings"]``.

    The times are null until the last moment, and ``found["attempting"]`` set.

    Args:
        item: ``request``, the path of a pickled StepRequest; ``findings``, the path of the JSON to write; ``footprint``
            of the training process; ``budget_bytes``; ``threads``; ``sys_path``; ``device_free_bytes``: as
            ``preflight_probe.measure`` takes them.
    """
    volunteer_to_be_killed()
    sys.path.extend(folder for folder in item["sys_path"] if folder not in sys.path)
    torch.set_num_threads(item["threads"])
    request: StepRequest = pickle.loads(Path(item["request"]).read_bytes())  # the parent wrote it just now
    findings, micro_batch = Path(item["findings"]), request.largest_micro_batch
    probe = StepProbe(request)
    found = replace(probe.begin(StepMeasurement(), item["device_free_bytes"]), attempting=micro_batch)
    _write(findings, found, None)
    if request.compute.device.type != "cuda":
        limit_to_budget(Footprint(**item["footprint"]), int(item["budget_bytes"]))
    found = probe.with_measured(found, micro_batch)
    if micro_batch in found.failures:
        _write(findings, found, None)
        return
    _write(findings, replace(found, attempting=micro_batch), None)
    timed = timed_step(request)
    if timed.fitted < micro_batch:
        found = found.with_failure(micro_batch, f"the third step came to micro-batch {timed.fitted}")
    _write(findings, found, timed)


@dataclass(frozen=True)
class TimedStep:
    """What one training step on a full effective batch takes.

    Attributes:
        seconds: of the quickest of several, which other processes disturbed least.
        own_seconds: what of them this process computed, on the CPU; elsewhere the same.
        fitted: the micro-batch that fitted.
    """

    seconds: float
    own_seconds: float
    fitted: int


def timed_step(request: StepRequest) -> TimedStep:
    """Timed over two micro-batches at most, which stand for the others, and over the optimizer's step."""
    task, compute, micro_batch = request.task, request.compute, request.largest_micro_batch
    (window,) = load_batches(
        task.training_data, [list(range(min(request.window_size, 2 * micro_batch)))], num_workers=0
    )
    times: list[float] = []
    own: list[float] = []
    with deterministic_algorithms(compute.device):
        model = task.build_model().to(compute.device).train()
        if request.gradient_checkpointing:
            recompute_activations(model)
        precision = Precision(compute)
        stepper = Stepper(
            model, precision, learning_rate=1e-6, weight_decay=0.0, max_gradient_norm=1.0, device=compute.device
        )
        transaction = BatchTransaction(task, model, precision, compute.device)
        fitted = micro_batch
        while len(times) < _MOST_TIMED_STEPS and sum(times) < _TIMED_SECONDS and fitted == micro_batch:
            begun, own_begun = _now(compute.device), _own_now(compute.device)
            result = transaction.gradients(window, micro_batch)
            computed, own_computed = _now(compute.device), _own_now(compute.device)
            stepper.take(result, 1e-6)
            taken, own_taken = _now(compute.device), _own_now(compute.device)
            fitted = min(fitted, result.micro_batch)
            times.append((computed - begun) * request.window_size / len(window) + (taken - computed))
            own.append((own_computed - own_begun) * request.window_size / len(window) + (own_taken - own_computed))
    return TimedStep(min(times), min(own), fitted)


def _now(device: torch.device) -> float:
    """Seconds, once what was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def _own_now(device: torch.device) -> float:
    """Seconds that this process has computed with all of its threads at work; on an accelerator simply the time."""
    return time.process_time() / torch.get_num_threads() if device.type == "cpu" else _now(device)


def _write(findings: Path, found: StepMeasurement, timed: TimedStep | None) -> None:
    times = [timed.seconds, timed.own_seconds] if timed is not None else [None, None]
    write_json(findings, {"found": found.to_document(), "step_seconds": times[0], "own_step_seconds": times[1]})
