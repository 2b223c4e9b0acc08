import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fvc_lib.engine.loading import batch_size_of, batches_per_epoch, effective_batches, epoch_order, share
from fvc_lib.engine.task import Stream

SIZES = st.integers(1, 60)
SEEDS = st.integers(0, 2**63 - 1)


@given(SIZES, st.integers(0, 50), SEEDS)
def test_an_epoch_is_a_permutation_and_a_pure_function(num_samples, epoch, seed):
    order = epoch_order(num_samples, epoch, seed)
    assert sorted(order.tolist()) == list(range(num_samples))
    assert epoch_order(num_samples, epoch, seed).tolist() == order.tolist()


def test_epochs_and_seeds_differ():
    orders = {tuple(epoch_order(30, epoch, seed).tolist()) for epoch in range(4) for seed in range(4)}
    assert len(orders) == 16


@given(st.lists(st.sampled_from([0, 1, 5]), min_size=1, max_size=60), SEEDS)
def test_balanced_sampling_gives_classes_equal_places_and_members_equal_turns(classes, seed):
    order = epoch_order(len(classes), 0, seed, classes)
    drawn = np.asarray(classes)[order]
    places = [int((drawn == kind).sum()) for kind in set(classes)]
    assert order.size == len(classes)
    assert max(places) - min(places) <= 1
    for kind in set(classes):
        turns = [int((order == member).sum()) for member in np.flatnonzero(np.asarray(classes) == kind)]
        assert max(turns) - min(turns) <= 1


@given(SIZES, st.integers(1, 20), SEEDS, st.data())
def test_effective_batches_cover_the_order_and_go_on_from_any_position(num_samples, size, seed, data):
    order = epoch_order(num_samples, 0, seed)
    whole = effective_batches(order, size)
    assert [index for batch in whole for index in batch] == order.tolist()
    assert len(whole) == batches_per_epoch(num_samples, size)
    assert all(len(batch) == size for batch in whole[:-1])
    first = data.draw(st.integers(0, len(whole)))
    assert effective_batches(order, size, first) == whole[first:]


def test_the_order_is_the_same_on_every_machine():
    """A change of this order changes every result: it needs a reason."""
    assert epoch_order(8, 0, 0).tolist() == [5, 1, 7, 2, 0, 4, 6, 3]


@given(st.integers(0, 40), st.integers(1, 12))
def test_the_ranks_shares_of_a_batch_are_the_batch(num_samples, num_ranks):
    batch = list(range(100, 100 + num_samples))
    shares = [share(batch, rank, num_ranks) for rank in range(num_ranks)]
    assert [index for part in shares for index in part] == batch
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 60), st.integers(1, 20))
def test_the_size_of_every_effective_batch_is_known_beforehand(num_samples, size):
    cut = effective_batches(np.arange(num_samples), size)
    assert [batch_size_of(num_samples, size, batch) for batch in range(len(cut))] == [len(batch) for batch in cut]
    assert batch_size_of(num_samples, size, len(cut)) == 0


@pytest.mark.parametrize("size", [1, 5, 8, 40])
def test_every_batch_can_be_drawn_evenly_from_the_classes(size):
    """Of the rare class, too, and in the last, smaller batch; no sample comes much more often than its like."""
    classes = [0] * 23 + [1] * 4
    order = epoch_order(27, 3, 1, classes, size)
    assert (
        order.tolist() == epoch_order(27, 3, 1, classes, size).tolist() != epoch_order(27, 4, 1, classes, size).tolist()
    )
    batches = effective_batches(order, size)
    assert sum(map(len, batches)) == 27
    for batch in batches:
        fakes = sum(classes[index] for index in batch)
        assert abs(2 * fakes - len(batch)) <= 1
    times = np.bincount(order, minlength=27)
    for members in (times[:23], times[23:]):
        assert members.max() - members.min() <= 1


def shards_of(sizes, buffer):
    """Samples of shards of these sizes, one shard's after the other's, and each shard's from its last to its first."""
    shards = np.repeat(np.arange(len(sizes)), sizes)
    places = np.concatenate([np.arange(size)[::-1] for size in sizes])
    return Stream(shards, places, buffer)


SHARDS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@given(SHARDS, st.integers(1, 50), st.integers(0, 50), SEEDS)
def test_a_stream_is_a_permutation_and_a_pure_function_of_epoch_and_seed(sizes, buffer, epoch, seed):
    stream = shards_of(sizes, buffer)
    order = epoch_order(sum(sizes), epoch, seed, stream=stream)
    assert sorted(order.tolist()) == list(range(sum(sizes)))
    assert epoch_order(sum(sizes), epoch, seed, stream=stream).tolist() == order.tolist()


@given(SHARDS, st.integers(1, 20), SEEDS)
def test_no_sample_of_a_stream_comes_before_the_buffer_has_read_it(sizes, buffer, seed):
    """Read one by one in the order of a buffer of 1, sample number n is out after n - buffer others at the earliest."""
    read = epoch_order(sum(sizes), 0, seed, stream=shards_of(sizes, 1)).tolist()
    came = epoch_order(sum(sizes), 0, seed, stream=shards_of(sizes, buffer)).tolist()
    assert all(read.index(sample) < number + buffer for number, sample in enumerate(came))


@given(SHARDS, SEEDS)
def test_a_buffer_of_one_reads_every_shard_from_its_beginning_to_its_end(sizes, seed):
    stream = shards_of(sizes, 1)
    order = epoch_order(sum(sizes), 0, seed, stream=stream)
    shards = stream.shards[order].tolist()
    assert sum(one != other for one, other in itertools.pairwise(shards)) == len(sizes) - 1
    for shard in range(len(sizes)):
        assert stream.places[order[stream.shards[order] == shard]].tolist() == list(range(sizes[shard]))


def test_epochs_of_a_stream_differ_in_the_order_of_shards_and_within_the_buffer():
    stream = shards_of([10] * 6, 5)
    orders = [epoch_order(60, epoch, 0, stream=stream) for epoch in range(6)]
    assert len({tuple(order.tolist()) for order in orders}) == 6
    assert len({int(stream.shards[order[0]]) for order in orders}) > 1
    assert epoch_order(60, 0, 0, stream=shards_of([10] * 6, 60)).tolist() != epoch_order(60, 0, 0).tolist()


@pytest.mark.parametrize("size", [None, 6])
def test_balanced_classes_are_drawn_from_a_stream_as_well(size):
    classes = np.array(([0] * 5 + [1]) * 10)
    stream = shards_of([12] * 5, 8)
    order = epoch_order(60, 2, 7, classes.tolist(), size, stream)
    assert np.bincount(classes[order]).tolist() == [30, 30]
    assert np.bincount(order[classes[order] == 1]).max() == 3
    for batch in effective_batches(order, 6) if size else ():
        assert classes[batch].sum() == 3
    commons = stream.shards[order[classes[order] == 0]]
    assert np.unique(commons).size < 5  # those that come at all lie in the shards that are read first


def test_the_order_of_a_stream_is_the_same_on_every_machine():
    """A change of this order changes every result: it needs a reason."""
    assert epoch_order(8, 0, 0, stream=shards_of([3, 3, 2], 3)).tolist() == [5, 3, 1, 2, 0, 7, 6, 4]
