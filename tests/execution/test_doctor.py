"""The doctor finds what is broken, names a remedy, and survives what it looks at."""

from pathlib import Path

import pytest

from fvc_lib.execution import doctor
from fvc_lib.execution.doctor import diagnose
from fvc_lib.services.config import RunConfig


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(**{name: str(tmp_path / name) for name in ("runs_dir", "cache_dir", "data_dir")})


@pytest.mark.slow
def test_a_sound_machine_has_no_problem_and_every_other_finding_a_remedy(config, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "CHILD_SECONDS", 600.0)
    findings = diagnose(config)
    assert {finding.state for finding in findings} <= {"ok", "warning"}, findings
    assert {"packages", "torch on cpu", "disk for runs", "memory"} <= {finding.name for finding in findings}
    assert all(finding.remedy for finding in findings if finding.state != "ok")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "device", "words"),
    [
        ("raise ImportError('libcudart.so.13 is missing')", "auto", "libcudart.so.13"),
        ("import os; os.kill(os.getpid(), 11)", "auto", "SIGSEGV"),
        ("def ones(*_, **__): raise RuntimeError('no kernel image')", "cuda", "no kernel image"),
    ],
)
def test_a_torch_or_device_that_does_not_work_is_a_problem(config, tmp_path, monkeypatch, source, device, words):
    package = tmp_path / "path" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__version__ = '9'\n{source}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    (finding,) = doctor.torch(config.model_copy(update={"device": device}))
    assert (finding.state, words in finding.found) == ("problem", True)
