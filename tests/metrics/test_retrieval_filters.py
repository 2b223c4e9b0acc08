from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fvc_lib.metrics import retrieval
from fvc_lib.metrics.retrieval import RetrievalPlan, Rows, largest_error
from tests.metrics.retrieval_oracle import check_against_naive, rows_of_kind, samples


@settings(max_examples=70, deadline=None)
@given(
    sample=samples(),
    block=st.integers(1, 30),
    most_open=st.sampled_from([-1.0, 0.03, 1.0]),  # in doubles, by need, in float32
    at_once=st.sampled_from([1, 20]),
)
def test_every_metric_is_that_of_a_dense_oracle(sample, block, most_open, at_once) -> None:
    videos, texts, text_of_video = sample
    plan = RetrievalPlan(len(videos), len(texts), videos.shape[1], block)
    with (
        mock.patch.object(retrieval, "_MOST_OPEN", most_open),
        mock.patch.object(retrieval, "_AT_ONCE", at_once),
        mock.patch.object(retrieval, "plan_retrieval", return_value=plan),
    ):
        check_against_naive(videos, texts, text_of_video)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-37, 1e-25, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("rows", ["normal", "half steps", "outliers", "within margins"])
def test_no_product_is_further_from_the_truth_than_is_said(dtype, scale: float, rows: str) -> None:
    generator = np.random.default_rng(0)
    videos, texts = (rows_of_kind(rows, generator, number, 64) for number in (300, 30))
    videos *= np.float32(scale)
    norms = [np.linalg.norm(each.astype(np.float64), axis=1) * (1 + 1e-12) for each in (videos, texts)]
    exact = [each.astype(np.longdouble) for each in (videos, texts)]
    off = np.abs(videos.astype(dtype) @ texts.astype(dtype).T - np.vecdot(exact[0][:, None], exact[1]))
    assert (off <= largest_error(norms[0], norms[1], 64, dtype)[:, None]).all()
    assert (off <= largest_error(norms[1], norms[0], 64, dtype)).all()


def test_rows_are_of_a_kind_where_all_numbers_agree() -> None:
    rows = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    rows[4], rows[7], rows[8] = rows[1], -rows[1], rows[1, ::-1]  # the last two have the same norm only
    assert Rows(torch.from_numpy(rows)).kinds.tolist() == [0, 1, 2, 3, 1, 5, 6, 7, 8]
    assert Rows(torch.tensor([[0.0, 1], [-0.0, 1]])).kinds.tolist() == [0, 0]
