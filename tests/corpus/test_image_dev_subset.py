from collections import Counter

from hypothesis import given, settings, strategies as st

from fvc_lib.corpus.images import dev_subset

ROWS = st.lists(
    st.tuples(st.sampled_from(["pie", "soup", None]), st.sampled_from(["train", "train", "validation", "test"])),
    min_size=1, max_size=60,
)  # fmt: skip


@settings(max_examples=20)
@given(ROWS, st.integers(1, 5), st.integers(0, 3), st.randoms(use_true_random=False))
def test_a_subset_is_stratified_nested_and_independent_of_order(rows, per_stratum: int, seed: int, random) -> None:
    strata, parts = zip(*rows, strict=True)
    names = [f"image{number}" for number in range(len(rows))]
    kept = dev_subset(names, strata, parts, per_stratum=per_stratum, seed=seed)
    assert kept == sorted(set(kept))
    before, after = Counter(rows), Counter(rows[place] for place in kept)
    for (stratum, part), count in before.items():
        if part == "train":
            assert after[stratum, part] == min(count, per_stratum)
        else:
            share = min(1.0, per_stratum / before[stratum, "train"]) if before[stratum, "train"] else None
            assert 1 <= after[stratum, part] <= count
            if share is not None:
                assert after[stratum, part] == max(1, round(share * count))
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled = dev_subset(
        [names[p] for p in order], [strata[p] for p in order], [parts[p] for p in order],
        per_stratum=per_stratum, seed=seed,
    )  # fmt: skip
    assert sorted(order[place] for place in shuffled) == kept
    larger = dev_subset(names, strata, parts, per_stratum=per_stratum + 1, seed=seed)
    training = [place for place in kept if parts[place] == "train"]
    assert set(training) <= set(larger)
