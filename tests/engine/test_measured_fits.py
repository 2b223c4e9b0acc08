import json
import time
from dataclasses import replace

import polars as pl
import pytest
import torch
from fvc_lib.engine.memory.sweep import FitRow, fits_table, measure_fits, recommended, seconds_per_sample, timed_step

from fvc_lib.engine.memory import sweep as measured_fits, sweep as measured_fits_row
from fvc_lib.engine.memory.preflight import Footprint, StepMeasurement, StepRequest
from fvc_lib.engine.task import Sample
from fvc_lib.services.errors import StoppedError, UsageError
from fvc_lib.services.isolated_workers import Answer
from fvc_lib.services.memory_budget import MemoryBudget
from fvc_lib.services.tables import MEASURED_FITS, read_table, write_table
from fvc_lib.tasks.image.sweep import MadeUpImages, requests_on_made_up_images
from tests.kits.preflight_tasks import PictureTask

PLENTY = MemoryBudget(1 << 40, "plenty")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def requests(task=None, effective_batch_size=8, **changes):
    request = StepRequest(task or PictureTask(), 4, effective_batch_size, device="cpu", **changes)
    return requests_on_made_up_images(request, 8)


def measure(make_request=None, **changes):
    sizes = {"batch_size": 4, "image_size": 16, "batch_sizes": (4,), "image_sizes": (16,)}
    asked = {**sizes, "num_samples": 20, "budget": PLENTY}
    return measure_fits(make_request or requests(), **{**asked, **changes})


class Children:
    """Stands for the child processes where only what is made of their findings is looked at.

    A step takes a kilobyte and a microsecond per pixel, and ends as ``ends`` says from so many pixels on.
    """

    def __init__(
        self, monkeypatch, from_pixels=1 << 60, answer=None, failure=None, seconds_per_pixel=1e-6, first_use=0,
        own_share=1.0,
    ):  # fmt: skip
        self.asked, self.from_pixels, self.answer, self.failure = [], from_pixels, answer, failure
        self.seconds_per_pixel, self.first_use, self.own_share = seconds_per_pixel, first_use, own_share
        monkeypatch.setattr(measured_fits, "measured_in_child", self)

    def __call__(self, function, request, footprint, budget_bytes, time_limit_seconds):
        size = request.task.training_data.image_size
        self.asked.append((request.micro_batch, size))
        pixels = request.micro_batch * size**2
        found = StepMeasurement(attempting=request.micro_batch, first_use_bytes=self.first_use)
        if pixels < self.from_pixels:
            seconds = request.window_size * size**2 * self.seconds_per_pixel
            document = {"found": found.with_step(request.micro_batch, 1000 * pixels).to_document()}
            times = {"step_seconds": seconds, "own_step_seconds": self.own_share * seconds}
            return Answer(0, None), {**document, **times}
        if self.failure:
            found = found.with_failure(request.micro_batch, self.failure)
        times = {"step_seconds": None, "own_step_seconds": None}
        return self.answer or Answer(0, None), {"found": found.to_document(), **times}


def test_a_row_is_measured_in_a_process_of_its_own_and_kept(tmp_path, monkeypatch):
    """One process for both tables, whose rows are the same here; none when it is asked again."""
    store = tmp_path / "fits.json"
    progress = []
    fits = measure(store=store, progress=lambda done, rows: progress.append((done, rows)), loading_seconds=0.5)
    assert progress == [(1, 2), (2, 2)]
    assert fits["varied"].to_list() == ["batch_size", "image_size"]
    assert fits["fits"].to_list() == [True, True]
    assert fits["detail"].to_list() == ["", ""]
    assert fits["device"][0].startswith("cpu (")
    assert fits["peak_bytes"][0] > 100_000_000  # the process that trains is part of it
    assert 10 < fits["seconds_per_epoch"][0] < 15  # of which loading takes ten
    assert fits.row(0)[1:] == fits.row(1)[1:]
    write_table(fits, MEASURED_FITS, tmp_path / "fits.parquet")
    assert read_table(tmp_path / "fits.parquet", MEASURED_FITS).equals(fits)

    monkeypatch.setattr(measured_fits, "measured_in_child", lambda *_, **__: pytest.fail("it measures"))
    again = measure(store=store, num_samples=40, loading_seconds=0.5)
    assert again["seconds_per_epoch"][0] == pytest.approx(2 * fits["seconds_per_epoch"][0])
    with pytest.raises(pytest.fail.Exception):
        measure(store=store, image_size=24)


def test_what_the_first_training_loads_is_counted_in_every_row_whenever_it_is_loaded(monkeypatch):
    """Looking at a model to know a row again loads it, in this process, after the first row's footprint was taken."""
    Children(monkeypatch, first_use=80_000_000)
    loaded = iter([False, True, True, True])
    monkeypatch.setattr(measured_fits, "footprint_of", lambda _, baseline: Footprint(baseline, next(loaded), 0))
    fits = measure(batch_sizes=(1, 2, 4), image_sizes=(24,))
    above = [peak - fits["peak_bytes"][0] for peak in fits["peak_bytes"]]
    assert above == [1000 * 16**2 * pictures for pictures in (0, 1, 3)] + [1000 * (4 * 24**2 - 16**2)]


@pytest.mark.parametrize(
    ("trouble", "fit", "said"),
    [
        ("be_killed", False, "memory ended: the process died of it (SIGKILL)"),
        pytest.param("segfault", False, "memory ended: the process died of it (SIGSEGV)", marks=pytest.mark.long),
        pytest.param("take_64_gib", False, "memory ended: ", marks=pytest.mark.long),
        pytest.param("raise", None, "ValueError: broken", marks=pytest.mark.long),
        pytest.param("hang", None, "no answer within 4 s", marks=pytest.mark.long),
    ],
)
def test_memory_that_ends_is_a_row_and_other_failures_are_not_taken_for_it(trouble, fit, said):
    make = requests(PictureTask(trouble, from_pixels=4 * 16**2))
    budget = MemoryBudget(8 << 30, "8 GiB")
    limit = 1.0 if trouble == "hang" else 60.0
    fits = measure(make, budget=budget, row_seconds=limit)
    assert fits["fits"].to_list() == [fit, fit]
    assert fits["peak_bytes"].to_list() == [None, None]
    assert said in fits["detail"][0]


def test_larger_rows_are_not_tried_once_one_did_not_fit(monkeypatch):
    children = Children(monkeypatch, 8 * 16**2, failure="no room")
    fits = measure(requests(effective_batch_size=16), batch_sizes=(16, 4, 8), image_sizes=(32, 8, 16))
    assert children.asked == [(4, 16), (8, 16), (4, 8), (4, 32)]
    assert fits["batch_size"].to_list() == [4, 8, 16, 4, 4, 4]
    assert fits["image_size"].to_list() == [16, 16, 16, 8, 16, 32]
    assert fits["fits"].to_list() == [True, False, None, True, True, False]
    assert fits["detail"].to_list()[1:3] == [
        "memory ended: no room", "not tried: 8 images at once did not fit already"
    ]  # fmt: skip


def test_what_is_over_the_budget_does_not_fit_though_it_ran(monkeypatch):
    """Of the first row nothing is known before it is measured."""
    Children(monkeypatch)
    roomy = measure()["peak_bytes"][0]
    budget = MemoryBudget(roomy + 400_000_000, "by design")
    fits = measure(budget=budget, image_size=512, image_sizes=(512,))
    assert fits["fits"].to_list() == [False, False]
    assert fits["peak_bytes"][0] == pytest.approx(roomy + 1000 * 4 * (512**2 - 16**2), abs=2e8)
    assert "GB are needed, more than the budget of " in fits["detail"][0]
    assert fits["detail"][0].endswith("(by design)")


def test_what_measuring_would_take_beside_this_process_stays_within_the_budget(monkeypatch):
    """A row's step is estimated from smaller ones; from one alone nothing is said of whether it would fit."""
    children = Children(monkeypatch)
    roomy = measure()["peak_bytes"][0]
    budget = MemoryBudget(roomy + 400_000_000, "by design")
    fits = measure(budget=budget, image_sizes=(16, 512))
    assert fits["fits"].to_list() == [True, True, None]
    assert fits["detail"][2].endswith("(by design) has no room for a process that measures")
    fits = measure(budget=budget, image_sizes=(16, 32, 512, 1024))
    assert fits["fits"].to_list() == [True, True, True, False, None]
    assert fits["peak_bytes"][3] == pytest.approx(roomy + 1000 * 4 * (512**2 - 16**2), abs=2e8)
    assert fits["detail"][3].startswith("not tried: about ")
    assert fits["detail"][3].endswith("GB (by design)")
    assert {size for _, size in children.asked} == {16, 32}


def test_what_would_take_too_long_is_not_tried(monkeypatch):
    children = Children(monkeypatch, seconds_per_pixel=1e-4)
    fits = measure(image_sizes=(16, 32, 64, 128), row_seconds=4.0)
    assert children.asked == [(4, 16), (4, 32)]
    assert fits["fits"].to_list() == [True, True, True, None, None]
    assert fits["detail"].to_list()[3:] == [
        "not tried: it would take about 10 s to find out, more than 4 s",
        "not tried: it would take about 39 s to find out, more than 4 s",
    ]


def test_neighbours_on_the_machine_do_not_decide_what_is_tried_nor_is_what_was_asked_for_left_out(monkeypatch):
    children = Children(monkeypatch, seconds_per_pixel=1e-4, own_share=0.1)
    fits = measure(image_sizes=(16, 32, 64, 128), row_seconds=4.0)
    assert fits["fits"].to_list() == [True] * 5
    assert len(children.asked) == 4
    slow = Children(monkeypatch, seconds_per_pixel=1.0)
    fits = measure(image_size=64, batch_size=8, batch_sizes=(4, 8, 16), image_sizes=(16, 64, 128), row_seconds=4.0)
    assert slow.asked == [(4, 64), (8, 64), (8, 16)]
    assert fits["fits"].to_list() == [True, True, None, True, True, None]


def test_where_no_process_has_room_beside_this_one_nothing_is_started(monkeypatch):
    children = Children(monkeypatch)
    fits = measure(budget=MemoryBudget(1000, "tight"))
    assert children.asked == []
    assert fits["fits"].to_list() == [None, None]
    assert fits["detail"][0] == "the budget of 0.00 GB (tight) has no room for a process that measures"


def test_a_task_that_cannot_be_sent_is_said_and_what_was_not_measured_is_not_kept(tmp_path):
    class Local(PictureTask):
        pass

    fits = measure(requests(Local()), store=tmp_path / "fits.json")
    assert fits["fits"].to_list() == [None, None]
    assert "cannot be sent to another process" in fits["detail"][0]
    assert not (tmp_path / "fits.json").exists()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"format": 1, "rows": []}', '{"format": 1, "rows": {"KEY": 3}}'])
def test_a_store_that_is_damaged_costs_a_measurement(tmp_path, monkeypatch, content):
    children, store = Children(monkeypatch), tmp_path / "fits.json"
    seconds = measure(store=store)["seconds_per_epoch"]
    key = next(iter(json.loads(store.read_text())["rows"]))
    store.write_text(content.replace("KEY", key))
    assert measure(store=store)["seconds_per_epoch"].equals(seconds)
    assert len(children.asked) == 2
    assert measure(store=store)["seconds_per_epoch"].equals(seconds)
    assert len(children.asked) == 2


@pytest.mark.parametrize(("workers", "seconds"), [(0, 20 * 256e-6 + 10), (1, 10), (4, 10 / 3)])
def test_loader_processes_load_while_the_training_computes(monkeypatch, workers, seconds):
    """Of three windows no more than three of them have something to do."""
    Children(monkeypatch)
    fits = measure(requests(num_workers=workers), loading_seconds=0.5)
    assert fits["seconds_per_epoch"][0] == pytest.approx(seconds)


def test_a_request_with_fewer_images_than_its_row_is_refused():
    with pytest.raises(UsageError, match="got a step with 4 images at once, wanted 8"):
        measure(lambda batch_size, image_size: requests()(4, image_size), batch_sizes=(8,))


def test_a_stop_is_heeded_between_rows(monkeypatch):
    children = Children(monkeypatch)
    with pytest.raises(StoppedError) as caught:
        measure(image_sizes=(16, 32), stop=lambda: bool(children.asked))
    assert caught.value.exit_code == 75
    assert children.asked == [(4, 16)]


def test_a_timed_step_stands_for_a_whole_effective_batch(monkeypatch):
    """Two micro-batches of four are timed for an effective batch of 32: four times as long, the optimizer once."""

    clock = [0.0]

    class Slow(PictureTask):
        def forward(self, model, batch):
            clock[0] += 0.02
            return super().forward(model, batch)

    class SlowStepper(measured_fits_row.Stepper):
        def take(self, result, learning_rate):
            clock[0] += 0.5
            return super().take(result, learning_rate)

    monkeypatch.setattr(measured_fits_row, "_now", lambda device: clock[0])
    monkeypatch.setattr(measured_fits_row, "Stepper", SlowStepper)
    request = requests(Slow(), effective_batch_size=32)(4, 16)
    timed = timed_step(request)
    assert timed.fitted == 4
    assert timed.seconds == pytest.approx(8 * 0.02 + 0.5)
    assert 0 < timed.own_seconds < 60  # by a clock of its own


def test_a_step_that_waits_for_others_has_computed_less_than_it_took():
    class Waits(PictureTask):
        def forward(self, model, batch):
            time.sleep(0.3)
            return super().forward(model, batch)

    timed = timed_step(requests(Waits())(4, 16))
    assert timed.seconds > 0.6
    assert timed.own_seconds < timed.seconds - 0.5


def test_made_up_images_are_like_a_sample_but_for_their_pictures():
    real = Sample(
        "a", {"image": torch.zeros(3, 8, 8, dtype=torch.uint8), "values": torch.ones(5), "of": torch.ones(2, 8)}
    )
    images = MadeUpImages(real, 8, 12, 3)
    (first, *_, last) = list(images)
    assert len(images) == 3
    assert first.sample_id != last.sample_id
    assert first.tensors["image"].shape == (3, 12, 12)
    assert first.tensors["image"].dtype == torch.uint8
    assert first.tensors["values"].equal(torch.ones(5))
    assert first.tensors["of"].shape == (2, 8)


def test_requests_on_made_up_images_leave_the_real_task_alone():
    task = PictureTask()
    real = task.training_data
    request = StepRequest(task, 4, 8, device="cpu", num_workers=3)
    made = requests_on_made_up_images(request, 8)(16, 32)
    assert task.training_data is real
    assert (made.largest_micro_batch, made.window_size, len(made.task.training_data)) == (16, 16, 48)
    assert made.task.training_data[0].tensors["image"].shape == (3, 32, 32)
    with pytest.raises(UsageError, match=r"got samples of image \(3, 8, 8\), wanted pictures of 9 pixels"):
        requests_on_made_up_images(request, 9)


def test_loading_is_timed_over_samples_spread_evenly():
    class Slow(list):
        def __getitem__(self, index):
            time.sleep(0.005)
            seen.append(index)
            return index

    seen = []
    assert seconds_per_sample(Slow(range(9)), 4) >= 0.005
    assert seen == [0, 2, 4, 6]
    assert seconds_per_sample([]) == 0


ROW = FitRow("batch_size", 4, 224, True, 10**9, 10.0, "cpu", "")


def fits_of(*rows):
    return fits_table(replace(ROW, **row) for row in rows)


def test_the_fastest_batch_size_that_fits_is_recommended_and_of_equals_the_smallest():
    fits = fits_of(
        {}, {"batch_size": 8, "seconds_per_epoch": 7.3}, {"batch_size": 16, "seconds_per_epoch": 7.0},
        {"batch_size": 24, "seconds_per_epoch": 5.0, "fits": False},
        {"batch_size": 32, "seconds_per_epoch": None, "fits": None, "peak_bytes": None, "detail": "not tried"},
        {"varied": "image_size", "image_size": 112, "seconds_per_epoch": 3.0},
        {"varied": "image_size", "image_size": 512, "seconds_per_epoch": 51.0, "peak_bytes": 4 * 10**9},
    )  # fmt: skip
    found = recommended(fits)
    assert (found.batch_size, found.image_size, found.largest_image_size) == (8, 224, 512)
    assert "Take batch_size 8 at 224 pixels: 7.3 s per epoch, predicted peak 1.00 GB" in found.sentence
    assert (
        "Up to 512 pixels were found to fit with batch_size 4: 51 s per epoch, predicted peak 4.00 GB" in found.sentence
    )
    assert "stays the same" in found.sentence


def test_where_the_resolution_asked_for_does_not_fit_the_largest_that_does_is_recommended():
    fits = fits_of(
        {"fits": False}, {"varied": "image_size", "image_size": 112}, {"varied": "image_size", "fits": False}
    )
    found = recommended(fits)
    assert (found.batch_size, found.image_size) == (4, 112)
    assert "Take image_size 112 with batch_size 4" in found.sentence


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "Nothing was measured"),
        ([{"fits": False}], "Nothing that was tried fits: lower image_size"),
        ([{"fits": None, "detail": "it hangs"}], "Nothing could be measured: it hangs"),
    ],
)
def test_where_nothing_fits_or_nothing_is_known_that_is_said(rows, said):
    found = recommended(fits_of(*rows))
    assert found.batch_size is None
    assert said in found.sentence


def test_an_empty_table_has_the_schema():
    assert fits_table([]).schema == pl.DataFrame(schema=fits_of({}).schema).schema
