"""Row 33: a checkpoint that runs code when it is unpickled, put where training looks for its own."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import pytest
import torch

from fvc_lib.services.checkpoint_files import append_digest
from fvc_lib.services.stage_logs import MetricLog
from fvc_lib.tasks.video.training import train_fold
from tests.faults.conftest import STAGE, result_of


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.fault(33)
def test_it_is_never_executed_whatever_its_digest_says(tiny, undisturbed, tmp_path, tally):
    folder, traces = tiny.paths.fold_checkpoints(0), [tmp_path / "zip ran", tmp_path / "pickle ran"]
    folder.mkdir(parents=True)
    torch.save({"format": 1, "state": Payload(traces[0])}, folder / "latest_checkpoint.pt")
    (folder / "previous_checkpoint.pt").write_bytes(pickle.dumps({"format": 1, "state": Payload(traces[1])}))
    evil = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in evil:
        append_digest(folder / name)
    with MetricLog(tiny.paths.metrics(STAGE, 0), run_id=tiny.paths.run_id, fold=0) as log:
        train_fold(tiny.paths, tiny.config, 0, metric_log=log)
    assert [trace for trace in traces if trace.exists()] == []
    assert result_of(tiny.paths) == undisturbed
    # The payloads work: a loader that trusts them runs them.
    torch.load(io.BytesIO(evil["latest_checkpoint.pt"]), weights_only=False)
    pickle.loads(evil["previous_checkpoint.pt"])
    assert all(trace.is_dir() for trace in traces)
    tally.add(survived=2)
