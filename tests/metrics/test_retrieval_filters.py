from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fvc_lib.metrics import retrieval, retrieval_stream
from fvc_lib.metrics.retrieval_stream import BYTES, DOUBLE, SINGLE, Format, RetrievalPlan, Rows, formats_for
from tests.metrics.retrieval_oracle import check_against_naive, rows_of_kind, samples

FORMATS = {"8 bits": (BYTES,), "single": (SINGLE,), "double": (DOUBLE,), "in turn": (BYTES, SINGLE, DOUBLE)}


@settings(max_examples=70, deadline=None)
@given(
    sample=samples(),
    blocks=st.tuples(st.integers(1, 30), st.integers(1, 15), st.integers(0, 3)),
    formats=st.sampled_from(sorted(FORMATS)),
    most_levels=st.sampled_from([0, 1, 2, 32]),
    at_once=st.sampled_from([1, 20]),
)
def test_every_metric_is_that_of_a_dense_oracle(sample, blocks, formats, most_levels, at_once) -> None:
    videos, texts, text_of_video = sample
    plan = RetrievalPlan(len(videos), len(texts), videos.shape[1], *blocks)
    kinds = FORMATS[formats] if videos.shape[1] >= 16 else (SINGLE, DOUBLE)  # torch's product of 8 bits needs as many
    with (
        mock.patch.object(retrieval_stream, "formats_for", return_value=kinds),
        mock.patch.object(retrieval_stream, "_MOST_LEVELS", most_levels),
        mock.patch.object(retrieval_stream, "_SCORES_AT_ONCE", at_once),
        mock.patch.object(retrieval, "plan_retrieval", return_value=plan),
    ):
        check_against_naive(videos, texts, text_of_video)


def test_8_bits_are_used_where_the_processor_has_instructions_for_them_and_sums_fit(monkeypatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": True})
    most = 133_143
    assert formats_for(512) == formats_for(most) == (BYTES, SINGLE, DOUBLE)
    assert formats_for(8) == formats_for(most + 1) == (SINGLE, DOUBLE)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx_vnni": False})
    assert formats_for(512) == (SINGLE, DOUBLE)
    rows = np.full((3, most), 127.0, dtype=np.float32)
    operand = BYTES.operand(rows, norms_of(rows))
    assert (BYTES.scores(operand, operand) == most * 127**2).all()


def norms_of(rows: np.ndarray) -> np.ndarray:
    return np.linalg.norm(rows.astype(np.float64), axis=1) * (1 + 1e-12)


@pytest.mark.parametrize("kind", [BYTES, SINGLE, DOUBLE], ids=lambda kind: kind.name)
@pytest.mark.parametrize("scale", [1e-37, 1e-25, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("rows", ["normal", "half steps", "outliers", "within margins", "one of them large"])
def test_no_format_is_further_from_the_truth_than_it_says(kind: Format, scale: float, rows: str) -> None:
    generator = np.random.default_rng(0)
    videos, texts = (rows_of_kind(rows, generator, number, 64) for number in (300, 30))
    videos *= np.float32(scale)
    if rows == "one of them large":
        videos[0] *= 100  # clipped by a step that is made for the others
    left, right = kind.operand(videos, norms_of(videos)), kind.operand(texts, norms_of(texts))
    scores = kind.scores(left, right)
    truth = np.vecdot(videos[:, None].astype(np.float64), texts.astype(np.float64))
    off = np.abs(scores * (left.scale * right.scale) - truth)
    doubles = 1e-13 * left.norms * right.norms.max()  # which the truth itself may be off
    assert (off <= (kind.margin(left, right) + doubles)[:, None]).all()
    assert (off <= kind.margin(right, left) + doubles.max()).all()


def test_rows_are_of_a_kind_where_all_numbers_agree() -> None:
    rows = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    rows[4], rows[7], rows[8] = rows[1], -rows[1], rows[1, ::-1]  # the last two have the same norm only
    assert Rows(torch.from_numpy(rows)).kinds.tolist() == [0, 1, 2, 3, 1, 5, 6, 7, 8]
    assert Rows(torch.tensor([[0.0, 1], [-0.0, 1]])).kinds.tolist() == [0, 0]


def test_answers_are_counted_in_bytes_without_overflow() -> None:
    answers = np.random.default_rng(0).random((600, 515)) < 0.9
    for axis in (0, 1):
        np.testing.assert_array_equal(retrieval_stream._count(answers, axis), answers.sum(axis))
