from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fvc_lib.metrics import (
    retrieval_blocks as retrieval_rows,
)
from fvc_lib.metrics import (
    retrieval_stream,
)
from fvc_lib.metrics import (
    retrieval_stream as retrieval_counting,
)
from fvc_lib.metrics import (
    retrieval_stream as retrieval_filters,
)
from fvc_lib.metrics import (
    retrieval_stream as retrieval_masks,
)
from fvc_lib.metrics.retrieval import retrieval_metrics
from fvc_lib.metrics.retrieval_blocks import RetrievalPlan, Rows, double_products, in_whole_numbers
from fvc_lib.metrics.retrieval_stream import BYTES, DOUBLE, LIMBS, SINGLE, Filter, Mask, dimensions_of, padded_shape
from tests.metrics.retrieval_oracle import check_against_naive, rows_of_kind, samples

FORMATS = {
    "bytes": (BYTES,), "limbs": (LIMBS,), "single": (SINGLE,), "double": (DOUBLE,),
    "in turn": (BYTES, LIMBS, SINGLE, DOUBLE),
}  # fmt: skip


@settings(max_examples=70, deadline=None)
@given(
    sample=samples(),
    blocks=st.tuples(st.integers(1, 30), st.integers(1, 15), st.integers(1, 15)),
    formats=st.sampled_from(sorted(FORMATS)),
    worth_taking=st.sampled_from([0.0, 0.1, 1.0]),
    most_passes=st.sampled_from([1, 2, 32]),
    many_between=st.sampled_from([-1.0, 0.05, 1.0]),
    worth_narrowing=st.sampled_from([0.0, 0.3, 1.0]),
    at_once=st.sampled_from([1, 20]),
    by_torch=st.booleans(),
    as_whole_numbers=st.booleans(),
)
def test_every_metric_is_that_of_a_dense_oracle(
    sample,
    blocks,
    formats,
    worth_taking,
    most_passes,
    many_between,
    worth_narrowing,
    at_once,
    by_torch,
    as_whole_numbers,
) -> None:
    videos, texts, text_of_video = sample
    plan = RetrievalPlan(len(videos), len(texts), videos.shape[1], *blocks)
    kinds = FORMATS[formats] if videos.shape[1] >= 16 else (SINGLE, DOUBLE)
    with (
        mock.patch.object(retrieval_stream, "filters_of", return_value=kinds),
        mock.patch.object(retrieval_counting, "_SHARE_WORTH_TAKING", worth_taking),
        mock.patch.object(retrieval_counting, "_MOST_PASSES", most_passes),
        mock.patch.object(retrieval_counting, "_MANY_BETWEEN", many_between),
        mock.patch.object(retrieval_counting, "_SHARE_WORTH_NARROWING", worth_narrowing),
        mock.patch.object(retrieval_counting, "_SETTLED_AT_ONCE", at_once),
        mock.patch.object(retrieval_masks, "_ANSWERS_AT_ONCE", at_once),
        mock.patch.object(retrieval_masks, "COMPARED_BY_NUMPY", set() if by_torch else {"cpu"}),
        mock.patch.object(retrieval_filters, "MULTIPLIED_BY_NUMPY", set() if by_torch else {"cpu"}),
        mock.patch.object(retrieval_rows, "_LARGEST_PRODUCT", 2.0**53 if as_whole_numbers else -1.0),
    ):
        check_against_naive(videos, texts, text_of_video, plan=plan)


def test_a_pair_between_several_thresholds_is_settled_once_for_each() -> None:
    """Ties of queries with one positive, two and three, which are compared together and then without the first ones."""
    videos = np.repeat(np.array([[0.3, -0.7, 0.1]], dtype=np.float32), 6, axis=0)
    texts = np.array([[0.2, 0.1, 0.7], [0.1, -0.3, 0.4], [1.1, 0.2, 0.3]], dtype=np.float32)
    for share in (0.0, 0.5, 1.0):
        with (
            mock.patch.object(retrieval_stream, "filters_of", return_value=(SINGLE,)),
            mock.patch.object(retrieval_counting, "_SHARE_WORTH_NARROWING", share),
            mock.patch.object(retrieval_counting, "_MANY_BETWEEN", 1.0),
        ):
            check_against_naive(videos, texts, np.array([0, 1, 1, 2, 2, 2]))


def norms_of(rows: np.ndarray) -> np.ndarray:
    return np.linalg.norm(rows.astype(np.float64), axis=1) * (1 + 1e-12)


@pytest.mark.parametrize("kind", [BYTES, LIMBS, SINGLE, DOUBLE], ids=lambda kind: kind.name)
@pytest.mark.parametrize("scale", [1e-37, 1e-25, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("rows", ["normal", "half steps", "outliers", "within margins", "one of them large"])
def test_no_format_is_further_from_the_truth_than_it_says(kind: Filter, scale: float, rows: str) -> None:
    generator = np.random.default_rng(0)
    videos, texts = (rows_of_kind(rows, generator, 300, 64) for _ in range(2))
    videos *= np.float32(scale)
    if rows == "one of them large":
        videos[0] *= 100  # clipped by a step that is made for the others
    norms = [norms_of(sides) for sides in (videos, texts)]
    left = kind.operand(torch.from_numpy(videos), norms[0])
    right = kind.operand(torch.from_numpy(texts[:30]), norms[1][:30], reverse=True)
    scores = torch.empty(300, 30, dtype=kind.scores)
    kind.multiply(left, right, scores, torch.empty(256 * 30, dtype=torch.int32))
    truth = np.array([double_products(np.repeat(row[None], 30, axis=0), texts[:30]) for row in videos])
    off = np.abs(scores.numpy() * kind.scale(left, right) - truth)
    doubles = 1e-13 * norms[0] * norms[1].max()  # which the truth itself may be off
    assert (off <= (kind.margin(left, right, 64) + doubles)[:, None]).all()
    assert (off <= kind.margin(right, left, 64) + doubles.max()).all()


def test_three_bytes_are_finer_than_float32() -> None:
    rows = np.random.default_rng(0).normal(size=(200, 512)).astype(np.float32)
    norms = norms_of(rows)
    operands = {kind: kind.operand(torch.from_numpy(rows), norms) for kind in (LIMBS, SINGLE)}
    margins = {kind.name: kind.margin(operand, operand, 512) for kind, operand in operands.items()}
    assert (10 * margins[LIMBS.name] < margins[SINGLE.name]).all()
    assert margins[LIMBS.name].max() < 3e-6 * norms.max() ** 2


def test_bytes_are_used_while_their_sums_fit() -> None:
    for kind in (BYTES, LIMBS):
        most = dimensions_of(kind)[-1]
        assert kind.limbs * most * 127**2 < 2**31
        rows = torch.full((3, most), 127.0)
        left, right = (kind.operand(rows, norms_of(rows.numpy()), reverse=reverse) for reverse in (False, True))
        scores = torch.empty(3, 3, dtype=kind.scores)
        kind.multiply(left, right, scores, torch.empty(256 * 3, dtype=torch.int32))
        assert np.allclose(scores.numpy() * kind.scale(left, right), most * 127.0**2, rtol=1e-5)


@pytest.mark.parametrize("dimensions", [3, 16])
@pytest.mark.parametrize("kind", ["quantised", "signs", "quarters"])
def test_of_whole_numbers_nothing_is_settled_one_by_one(kind: str, dimensions: int) -> None:
    generator = np.random.default_rng(0)
    videos, texts = (rows_of_kind(kind, generator, number, dimensions) for number in (40, 12))
    lines: list[str] = []
    with mock.patch.object(retrieval_stream, "filters_of", return_value=(SINGLE, DOUBLE)):
        retrieval_metrics(videos, texts, generator.integers(0, 12, 40), log=lines.append)
    assert lines[-1] == "similarities: blocks 1 in float32; 0 pairs settled one by one without rounding"


def units(videos: np.ndarray, texts: np.ndarray) -> tuple[float, float | None, float, float | None]:
    given = (Rows(torch.from_numpy(rows.astype(np.float32)), norms_of(rows)) for rows in (videos, texts))
    left, right = in_whole_numbers(*given)
    if left.largest is not None:
        np.testing.assert_array_equal(left.between(0, len(left)).numpy() * np.float64(left.unit), videos)
    return left.unit, left.largest, right.unit, right.largest


def test_units_are_found_where_all_numbers_are_small_multiples() -> None:
    ones = np.ones((3, 4))
    signs = np.float32(0.3) * np.array([[1, -1, 0, 2]], dtype=np.float32)
    assert units(signs, ones) == (float(np.float32(0.3)), 2, 1, 1)
    assert units(np.array([[2.0, -3, 0.0, 0.5]]), ones) == (0.5, 6, 1, 1)
    assert units(np.array([[2.0, -3, 0.0, 4]]), ones) == (1.0, 4, 1, 1)
    assert units(np.zeros((2, 4)), ones) == (1.0, 0, 1, 1)
    late = np.ones((70_000, 4))
    late[-1, -1] = 0.75
    assert units(late, ones) == (0.25, 4, 1, 1)
    late[-1, -1] = np.float32(1 / 3)
    none = (1.0, None, 1.0, None)
    assert units(late, ones) == none
    assert units(np.array([[1, 2.0**-30]]), np.ones((1, 2))) == none  # a range of too many
    assert units(np.array([[2.0**-120]]), np.ones((1, 1))) == none  # a unit whose reciprocal is none
    large = np.array([[1, 2.0**22]])
    assert units(large, large) == (1, 2.0**22, 1, 2.0**22)
    assert units(np.repeat(large, 600, axis=1), np.repeat(large, 600, axis=1)) == none  # sums that doubles would round


def test_answers_are_counted_and_found_where_they_are() -> None:
    scores = torch.from_numpy(np.random.default_rng(0).integers(0, 9, (300, 37)).astype(np.int32))
    memory = torch.ones(np.prod(padded_shape(300, 37)), dtype=torch.bool)
    for axis, limits in ((0, np.arange(300) % 9), (1, np.arange(37) % 9)):
        mask = Mask(300, 37, memory)
        mask.compare(scores, limits.astype(np.int32), axis)
        expected = scores.numpy() >= np.expand_dims(limits, 1 - axis)
        np.testing.assert_array_equal(mask.counts(0), expected.sum(1))
        np.testing.assert_array_equal(mask.counts(1), expected.sum(0))
        places = [np.stack(part) for part in mask.positions()]
        np.testing.assert_array_equal(np.concatenate(places, axis=1), np.nonzero(expected))
