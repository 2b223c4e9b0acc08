"""Weights by a hub's name: only where that is allowed, and what the message says where it cannot be."""

import pytest

from fvc_lib.detectors.network import weights_path
from fvc_lib.execution.run.which_run import with_absolute_paths
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that cannot be reached, with one repository in its cache; how that lies is the hub's own."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name, file in (("tiny--net", "model.safetensors"), ("tiny--empty", "config.json")):
        repository = tmp_path / f"models--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        (repository / "snapshots" / COMMIT).mkdir(parents=True)
        (repository / "snapshots" / COMMIT / file).write_bytes(b"{}")
    return tmp_path


def test_nothing_is_fetched_unless_allowed_and_the_message_says_what_to_do():
    remedy = r"no such file or folder.*allow_download true.*hf download facebook/dinov2-small --local-dir FOLDER"
    with pytest.raises(UsageError, match=remedy):
        with_absolute_paths(RunConfig(model_weights="facebook/dinov2-small"))
    with pytest.raises(UsageError, match=remedy):
        weights_path("facebook/dinov2-small")
    with pytest.raises(UsageError, match="no such file or folder on this machine"):
        weights_path("/nowhere/at/all.pth")
