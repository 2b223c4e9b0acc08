from hypothesis import given, strategies as st

from fvc_lib.engine.loading import epoch_order, share

SIZES = st.integers(1, 60)
SEEDS = st.integers(0, 2**63 - 1)


@given(SIZES, st.integers(0, 50), SEEDS)
def test_an_epoch_is_a_permutation_and_a_pure_function(num_samples, epoch, seed):
    order = epoch_order(num_samples, epoch, seed)
    assert sorted(order.tolist()) == list(range(num_samples))
    assert epoch_order(num_samples, epoch, seed).tolist() == order.tolist()


def test_the_order_is_the_same_on_every_machine():
    """A change of this order changes every result."""
    assert epoch_order(8, 0, 0).tolist() == [5, 1, 7, 2, 0, 4, 6, 3]


@given(st.integers(0, 40), st.integers(1, 12))
def test_the_ranks_shares_of_a_batch_are_the_batch(num_samples, num_ranks):
    batch = list(range(100, 100 + num_samples))
    shares = [share(batch, rank, num_ranks) for rank in range(num_ranks)]
    assert [index for part in shares for index in part] == batch
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
