import pytest
from hypothesis import given, strategies as st

from fvc_lib.engine.memory.preflight import Footprint, Prediction, PreflightReport, estimate
from fvc_lib.services.memory.budget import MemoryBudget
from fvc_lib.services.memory.measured_steps import StepMeasurement

MB = 10**6


def footprint(resident_mb=300, trained_before=False, num_workers=0):
    return Footprint(resident_mb * MB, trained_before, num_workers)


def found(steps_mb, first_use_mb=0, failures=None, **others_mb):
    others = {name: value * MB for name, value in others_mb.items()}
    steps = {micro_batch: value * MB for micro_batch, value in steps_mb.items()}
    return StepMeasurement(first_use_mb * MB, step_bytes=steps, failures=failures or {}, **others)


def prediction(measured, footprint, planned=8, budget_bytes=0):
    return Prediction(measured, footprint, planned, MemoryBudget(budget_bytes, "by design"))


def test_a_measured_step_is_taken_as_it_is_and_larger_ones_lie_on_the_line_through_the_two_largest():
    measured = {1: 50, 2: 60, 8: 140}
    assert [estimate(measured, n) for n in (1, 2, 8)] == [50, 60, 140]
    assert estimate({1: 50, 2: 60}, 16) == 200
    assert estimate(measured, 16) == pytest.approx(140 + 8 * 80 / 6, abs=1)


@given(
    st.dictionaries(st.integers(1, 64), st.integers(0, 10**10), min_size=1),
    st.integers(1, 64),
)
def test_no_micro_batch_is_estimated_below_a_smaller_one_that_was_measured(measured, micro_batch):
    if micro_batch not in measured:
        assert estimate(measured, micro_batch) >= max([0, *(v for n, v in measured.items() if n < micro_batch)])


def test_the_peak_is_the_process_with_what_a_first_training_loads_and_the_step():
    measured = found({4: 100}, first_use_mb=75)
    assert prediction(measured, footprint()).peak_bytes(4) == 475 * MB
    assert prediction(measured, footprint(trained_before=True)).peak_bytes(4) == 400 * MB
    assert prediction(found({}), footprint()).peak_bytes(4) is None


def test_a_loader_process_counts_in_the_peak_and_the_batches_it_keeps_ready_beside_it():
    measured = found({4: 100}, batch_bytes=10, worker_bytes=20)
    just_enough = prediction(measured, footprint(num_workers=2), 4, 480 * MB)
    assert just_enough.peak_bytes(4) == (300 + 100 + 2 * 20) * MB
    assert just_enough.reserved_bytes == 2 * 2 * 10 * MB
    assert just_enough.fitting_micro_batch() == 4
    # What comes after training comes when the loader processes are gone.
    later = [Footprint(0, False, 2, after_training_bytes=kept * MB) for kept in (50, 30)]
    assert [prediction(measured, each, 8, 500 * MB).reserved_bytes for each in later] == [50 * MB, 40 * MB]


@pytest.mark.parametrize(("budget_mb", "fitting"), [(480, 2), (479, 1), (440, 1), (439, 0), (400, 0), (100, 0)])
def test_loader_processes_are_given_up_before_the_training(budget_mb, fitting):
    measured = found({1: 50, 4: 100}, batch_bytes=10, worker_bytes=20, first_use_mb=50)
    planned = prediction(measured, footprint(num_workers=2), 1, budget_mb * MB)
    assert planned.num_workers == fitting
    assert (planned.fitting_micro_batch() == 1) == (budget_mb >= 400)
    report = PreflightReport(**vars(planned), micro_batch=1)
    assert (f"The budget holds {fitting} of 2 loader processes" in report.message()) == (fitting < 2)
    unmeasured = prediction(found({}, worker_bytes=20), footprint(num_workers=2), 1, budget_mb * MB)
    assert unmeasured.num_workers == 2


def test_the_largest_that_ran_and_fits_is_chosen():
    measured = found({1: 50, 2: 100, 4: 200})
    assert prediction(measured, footprint(), 4, 500 * MB).fitting_micro_batch() == 4
    assert prediction(measured, footprint(), 4, 499 * MB).fitting_micro_batch() == 2
    assert prediction(measured, footprint(), 2, 900 * MB).fitting_micro_batch() == 2
    assert prediction(measured, footprint(), 8, 350 * MB).fitting_micro_batch() == 1
    assert prediction(measured, footprint(), 8, 349 * MB).fitting_micro_batch() is None


def test_room_for_what_comes_after_training_is_kept_in_the_budget_but_not_in_the_prediction():
    measured, modest = found({1: 50, 2: 100}), Footprint(300 * MB, False, 0, after_training_bytes=50 * MB)
    assert prediction(measured, modest, 2, 450 * MB).fitting_micro_batch() == 2
    assert prediction(measured, modest, 2, 449 * MB).fitting_micro_batch() == 1
    assert prediction(measured, modest).peak_bytes(2) == 400 * MB


def walk(planned, budget_mb, cost_mb, failing_from=99):
    """What is measured, one after the other, when a step costs ``cost_mb(micro_batch)``."""
    state, order = StepMeasurement(), []
    training = prediction(state, footprint(), planned, budget_mb * MB)
    while (micro_batch := training.next_to_measure()) is not None:
        order.append(micro_batch)
        if micro_batch >= failing_from:
            state.failures[micro_batch] = "no memory"
        else:
            state.step_bytes[micro_batch] = cost_mb(micro_batch) * MB
    return order, training.fitting_micro_batch()


def test_twice_as_much_is_measured_each_time_up_to_the_planned_one_when_it_should_fit():
    assert walk(8, 10_000, lambda n: 50 * n) == ([1, 2, 4, 8], 8)
    assert walk(6, 10_000, lambda n: 50 * n) == ([1, 2, 4, 6], 6)
    assert walk(2, 10_000, lambda n: 50 * n) == ([1, 2], 2)
    assert walk(1, 10_000, lambda n: 50 * n) == ([1], 1)


def test_what_is_extrapolated_not_to_fit_is_never_run():
    assert walk(8, 550, lambda n: 50 * n) == ([1, 2, 4], 4)
    assert walk(8, 360, lambda n: 50 * n) == ([1, 2], 1)
    assert walk(8, 320, lambda n: 50 * n) == ([1], None)


def test_a_step_that_takes_more_than_extrapolated_gives_way_to_a_smaller_one():
    assert walk(8, 800, lambda n: 50 * n if n < 8 else 900) == ([1, 2, 4, 8], 4)
    assert walk(8, 10_000, lambda n: 50 * n, failing_from=4) == ([1, 2, 4], 2)
    assert walk(8, 10_000, lambda n: 50 * n, failing_from=1) == ([1], None)


def test_one_measurement_alone_is_taken_as_proportional():
    assert estimate({1: 50}, 8) == 400
    assert estimate({}, 8) is None
