import numpy as np
import pytest

from fvc_lib.metrics.abstention import (
    FAKE,
    REAL,
    UNDECIDED,
    abstention_rates,
    answers_that_tell,
    left_out_p_values,
    p_values,
    witnesses,
)


def corpus(rng, *, num_groups, shift, folds=5, spread=1.0):
    """Labels, scores, groups and folds of groups of one to four videos; videos of a group look alike."""
    sizes = rng.integers(1, 5, num_groups)
    group = np.repeat(np.arange(num_groups), sizes)
    label_of, centre = rng.integers(0, 2, num_groups), rng.normal(0, spread, num_groups)
    labels = label_of[group]
    scores = centre[group] + rng.normal(0, 0.3, group.size) + shift * labels
    return labels, scores, group, (np.arange(num_groups) % folds)[group]


def naive_p_values(labels, scores, groups, folds, new):
    """The definition, video by video."""
    found = []
    for label in (0, 1):
        names = sorted({g for g, y in zip(groups, labels, strict=True) if y == label})
        votes = 0.0
        for name in names:
            own = [i for i in range(len(labels)) if groups[i] == name and labels[i] == label]
            alike = [scores[i] >= new[folds[i]] if label == 0 else scores[i] <= new[folds[i]] for i in own]
            votes += np.mean(alike)
        found.append((1 + votes) / (1 + len(names)))
    return found


def test_p_values_are_those_of_the_definition():
    rng = np.random.default_rng(0)
    labels, scores, groups, folds = corpus(rng, num_groups=30, shift=1.0)
    scores = scores.round(1)  # ties too
    new = rng.normal(0.5, 1, (8, 5)).round(1)
    got = p_values(witnesses(labels, scores, groups, folds), new)
    wanted = np.array([naive_p_values(labels, scores, groups, folds, row) for row in new])
    assert np.allclose(np.stack([got.real, got.fake], axis=1), wanted, atol=1e-12)


@pytest.mark.parametrize("how", ["mean", "max"])
def test_a_case_of_dependent_videos_keeps_the_error_rate(how):
    rng = np.random.default_rng(4)
    labels, scores, groups, _ = corpus(rng, num_groups=400, shift=2.0, spread=0.5)
    known = witnesses(labels, scores, groups, np.zeros(labels.size, int))
    called = []
    for alike in (0.0, 0.5, 2.0):  # views of one event may differ much or hardly
        for label in (0, 1):
            centre = rng.normal(0, 0.5 * alike / 2, (120, 1))
            views = centre + rng.normal(0, 0.58 * (1 - alike / 4), (120, 4)) + 2.0 * label
            cases = [p_values(known, case[:, None]).of_case(how).answers((0.1, 0.1))[0] for case in views]
            called.append([cases.count(answer) / 120 for answer in ((FAKE, REAL)[label], (REAL, FAKE)[label])])
    wrong, right = zip(*called, strict=True)
    assert max(wrong) <= 0.1 + 3 * (0.1 * 0.9 / 120) ** 0.5
    assert min(right) > 0.3, "and it says something"
    one = p_values(known, np.array([[2.5]]))
    assert (one.of_case(how).real, one.of_case(how).fake) == (one.real, one.fake), "one video is its own case"


def test_a_witness_left_out_is_set_against_all_other_groups():
    rng = np.random.default_rng(1)
    labels, scores, groups, folds = corpus(rng, num_groups=20, shift=1.0)
    got = left_out_p_values(witnesses(labels, scores, groups, folds), groups)
    for i in range(0, len(labels), 7):
        others = groups != groups[i]
        one_network = np.zeros(int(others.sum()), int)
        rest = witnesses(labels[others], scores[others], groups[others], one_network)
        alone = p_values(rest, scores[i : i + 1, None])
        assert got.real[i] == pytest.approx(alone.real[0], abs=1e-8)
        assert got.fake[i] == pytest.approx(alone.fake[0], abs=1e-8)


@pytest.mark.parametrize("shift", [0.0, 1.5, 4.0])
def test_the_stated_rate_holds_on_new_groups_whatever_the_network_is_worth(shift):
    rng = np.random.default_rng(2)
    rate, wrong, undecided = 0.1, [], []
    for _ in range(100):
        labels, scores, groups, folds = corpus(rng, num_groups=60, shift=shift)
        new_labels, new_scores, new_groups, _ = corpus(rng, num_groups=40, shift=shift)
        # Networks of the folds agree up to noise, as they do in a run.
        seen = new_scores[:, None] + rng.normal(0, 0.2, (len(new_scores), 5))
        answers = np.array(p_values(witnesses(labels, scores, groups, folds), seen).answers((rate, rate)))
        first = np.unique(new_groups, return_index=True)[1]  # one video a group: independent trials
        for label, answer in ((0, FAKE), (1, REAL)):
            wrong += (answers[first][new_labels[first] == label] == answer).tolist()
        undecided.append(np.mean(answers == UNDECIDED))
    error = np.mean(wrong)
    assert error <= rate + 3 * np.sqrt(rate * (1 - rate) / len(wrong))
    assert (np.mean(undecided) > 0.75) == (shift == 0)  # a network that knows nothing answers little
    assert (np.mean(undecided) < 0.3) == (shift == 4)


def test_the_rate_is_stated_from_the_run_itself():
    rng = np.random.default_rng(3)
    labels, scores, groups, folds = corpus(rng, num_groups=400, shift=2.0)
    known = witnesses(labels, scores, groups, folds)
    rates = abstention_rates(known, left_out_p_values(known, groups).answers((0.05, 0.05)))
    assert rates.called_fake == pytest.approx(0.05, abs=0.02)
    assert rates.called_real == pytest.approx(0.05, abs=0.02)
    assert sum(rates.num_groups) == 400


def test_a_rate_below_one_in_the_number_of_groups_answers_nothing():
    rng = np.random.default_rng(4)
    labels, scores, groups, folds = corpus(rng, num_groups=30, shift=9.0)
    known = witnesses(labels, scores, groups, folds)
    real, fake = known.num_groups
    sure = p_values(known, np.array([[99.0] * 5, [-99.0] * 5]))
    assert sure.answers((1 / (real + 1), 1 / (fake + 1))) == [FAKE, REAL]
    assert sure.answers((0.99 / (real + 1), 1 / (fake + 1))) == [UNDECIDED, REAL]


def test_a_score_between_two_classes_that_never_come_near_it_is_no_answer():
    labels, groups = np.repeat([0, 1], 20), np.arange(40)
    known = witnesses(labels, np.where(labels == 1, 5.0, -5.0) + np.linspace(0, 1, 40), groups, groups % 2)
    assert p_values(known, np.zeros((1, 2))).answers((0.1, 0.1)) == [UNDECIDED]


def test_one_group_of_many_copies_has_one_vote():
    labels = [0] * 50 + [0] * 9 + [1] * 10
    groups = ["copies"] * 50 + [f"real {i}" for i in range(9)] + [f"fake {i}" for i in range(10)]
    scores = [3.0] * 50 + [0.0] * 9 + [2.0] * 10
    found = p_values(witnesses(labels, scores, groups, [0] * 69), [[2.5]])
    assert found.real[0] == pytest.approx(2 / 11)


@pytest.mark.parametrize("new", [[[np.nan, 0.0, 0.0]], [[0.0, 0.0]]])
def test_scores_that_cannot_be_meant_are_refused(new):
    known = witnesses([0, 1, 0], [0.1, 0.9, 0.3], [0, 1, 2], [0, 1, 2])
    assert p_values(known, [[0.0]] * 2).real.shape == (2,)
    with pytest.raises(ValueError, match="network of each fold"):
        p_values(known, new)


def test_an_answer_tells_where_its_own_class_gets_it_more_often_than_chance_explains():
    groups, labels = np.arange(20), np.repeat([0, 1], 10)
    known = witnesses(labels, labels.astype(float), groups, groups % 2)
    apart = [REAL] * 10 + [FAKE] * 10
    assert answers_that_tell(known, apart) == {REAL, FAKE}
    assert answers_that_tell(known, [UNDECIDED] * 20) == frozenset()
    assert answers_that_tell(known, apart[::-1]) == frozenset()
    # Four of ten fakes and no real: p = 210 / 4845 = 0.043; three: 0.105.
    assert answers_that_tell(known, [UNDECIDED] * 16 + [FAKE] * 4) == {FAKE}
    assert answers_that_tell(known, [UNDECIDED] * 17 + [FAKE] * 3) == frozenset()
