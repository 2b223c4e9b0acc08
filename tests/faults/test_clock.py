"""Row 27: the time of day jumps back by an hour again and again; nothing but the time stamps notices."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext

import pytest

from fvc_lib.analysis.read.queries import learning_curves
from fvc_lib.services.errors import StoppedError
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.tasks.video.training import train_fold
from tests.faults.conftest import STAGE, result_of


@pytest.fixture
def falling_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """``time.time`` of this process jumps back by an hour at every tenth call; returns what it told."""
    real, told = time.time, []

    def fall() -> float:
        told.append(real() - 3600 * (len(told) // 10))
        return told[-1]

    monkeypatch.setattr(time, "time", fall)
    monkeypatch.setattr(
        time, "gmtime", lambda seconds=None, real=time.gmtime: real(fall() if seconds is None else seconds)
    )
    return told


@pytest.mark.fault(27)
def test_training_logging_and_resuming_do_not_care(tiny, undisturbed, falling_clock):
    stops = iter([False] * 6 + [True] + [False] * 1_000_000)
    for attempt, ending in ((1, pytest.raises(StoppedError)), (2, nullcontext())):
        with MetricLog(tiny.paths.metrics(STAGE, 0), run_id=tiny.paths.run_id, fold=0, attempt=attempt) as log, ending:
            outcome = train_fold(
                tiny.paths, tiny.config, 0, metric_log=log, attempt=attempt, stop=lambda: next(stops)
            )  # fmt: skip
    assert falling_clock[-1] < falling_clock[0] - 3600
    assert result_of(tiny.paths) == undisturbed
    assert 0 < outcome.training.seconds < 3600
    stamps = [json.loads(line)["ts"] for line in tiny.paths.metrics(STAGE, 0).read_text().splitlines()]
    assert stamps != sorted(stamps)
    answer = learning_curves([tiny.paths], metrics=["loss"], phases=["train"])
    steps = answer.frame["step"].to_list()
    assert answer.notes == ()
    assert steps == list(range(steps[0], steps[0] + len(steps)))
