import numpy as np
import pytest
import sklearn.metrics

from fvc_lib.metrics.floors import leans_by_chance, mean_lean, real_source_floor, shuffled_label_aucs


def test_dealt_labels_give_chance_in_a_range_that_groups_make_wider():
    generator = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 10)
    labels = groups % 2
    scores = labels + generator.normal(0, 1, 40)[groups]
    found = shuffled_label_aucs(labels, scores, groups)
    assert found.shape == (200,)
    assert found.mean() == pytest.approx(0.5, abs=0.03)
    alone = shuffled_label_aucs(labels, scores, np.arange(400))
    assert found.std() > 2 * alone.std()


def test_the_floor_is_the_auc_between_the_two_largest_real_sources() -> None:
    generator = np.random.default_rng(0)
    sources = np.array(["phone"] * 60 + ["web"] * 50 + ["archive"] * 5 + [None] * 40, dtype=object)
    scores = generator.normal(0, 1, sources.size) + 1.5 * (sources == "phone")
    groups = np.arange(sources.size) // 2
    floor = real_source_floor(scores, sources, groups)
    two = np.isin(sources.astype(str), ["phone", "web"])
    assert (floor.higher, floor.lower, floor.num_higher, floor.num_lower) == ("phone", "web", 60, 50)
    wanted = sklearn.metrics.roc_auc_score(sources[two] == "phone", scores[two])
    assert floor.interval.value == pytest.approx(wanted, abs=1e-12)
    assert 0.5 < floor.interval.low < wanted < floor.interval.high
    other_way = real_source_floor(-scores, sources, groups)
    assert (other_way.higher, other_way.lower) == ("web", "phone")
    assert other_way.interval.value == pytest.approx(wanted, abs=1e-12)

    assert real_source_floor([0.1, 0.2, 0.3], ["phone", "phone", None], [0, 1, 2]) is None


def test_the_mean_lean_is_of_each_folds_auc_whichever_way_it_leans() -> None:
    generator = np.random.default_rng(2)
    folds, targets = np.repeat([0, 1, 2, 3], [30, 20, 12, 6]), np.repeat(["a", "b"], [50, 18])
    second = np.append(generator.random(62) < 0.4, [True] * 6)  # the last fold has one source and no say
    scores = np.round(generator.random(68) + np.where(folds % 2, 0.4, -0.4) * second, 1)  # with ties
    leans, pairs = [], []
    for fold in range(3):
        rows = folds == fold
        leans.append(abs(sklearn.metrics.roc_auc_score(second[rows], scores[rows]) - 0.5))
        pairs.append((second & rows).sum() * (~second & rows).sum())
    assert mean_lean(second, scores, folds)[0] == pytest.approx(np.average(leans, weights=pairs), abs=1e-12)
    of_targets = np.average(leans[:2], weights=pairs[:2]), leans[2]
    assert mean_lean(second, scores, folds, targets)[0] == pytest.approx(np.mean(of_targets), abs=1e-12)


def test_chance_leans_as_far_as_so_few_whole_groups_in_each_fold_let_it() -> None:
    """Folds of two groups, one of each source: whatever is dealt, a fold leans as far as it does."""
    scores, groups = np.arange(12.0), np.repeat(np.arange(6), 2)
    second, folds = np.repeat([False, True] * 3, 2), np.repeat([0, 1, 2], 4)
    assert set(leans_by_chance(second, scores, groups, folds, draws=50)) == {0.5}
    many = np.random.default_rng(3).random(400)
    by_chance = leans_by_chance(np.arange(400) % 2 == 0, many, np.arange(400), np.zeros(400), draws=200)
    assert 0.015 < by_chance.mean() < 0.03  # half-normal of standard deviation sqrt(401 / (12 * 200 * 200)) = 0.029
    assert leans_by_chance(second, scores, groups, folds, draws=7, seed=1).size == 7
