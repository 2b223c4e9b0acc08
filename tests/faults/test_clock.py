"""Row 27: the time of day jumps back by an hour again and again; only the time stamps show it."""

import json
import time

import pytest

from fvc_lib.analysis.read.queries import learning_curves
from fvc_lib.services.errors import StoppedError
from tests.faults.conftest import STAGE, result_of, train
from tests.kits.engine_kit import stop_after


@pytest.fixture
def falling_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let ``time.time`` jump back by an hour at every tenth call; return its answers."""
    now, date, answers = time.time, time.gmtime, []

    def fall() -> float:
        answers.append(now() - 3600 * (len(answers) // 10))
        return answers[-1]

    monkeypatch.setattr(time, "time", fall)
    monkeypatch.setattr(time, "gmtime", lambda seconds=None: date(fall() if seconds is None else seconds))
    return answers


@pytest.mark.fault(27)
def test_training_logging_and_resuming_do_not_care(tiny, undisturbed, falling_clock):
    with pytest.raises(StoppedError):
        train(tiny, stop=stop_after(6))
    outcome = train(tiny, attempt=2)
    assert falling_clock[-1] < falling_clock[0] - 3600
    assert result_of(tiny.paths) == undisturbed
    assert 0 < outcome.training.seconds < 3600
    stamps = [json.loads(line)["ts"] for line in tiny.paths.metrics(STAGE, 0).read_text().splitlines()]
    assert stamps != sorted(stamps)
    answer = learning_curves([tiny.paths], metrics=["loss"], phases=["train"])
    steps = answer.frame["step"].to_list()
    assert answer.notes == ()
    assert steps == list(range(steps[0], steps[0] + len(steps)))
