"""Row 10: videos without a clip are named before the first training step and take no part."""

import pytest
import torch

from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import PREDICTIONS, read_table
from tests.faults.conftest import STAGE, train


@pytest.mark.fault(10)
def test_videos_without_a_clip_are_named_before_the_first_step_and_take_no_part(tiny, caplog):
    lost, said = ["video00000", "video00007"], list[str]()
    for video_id in lost:
        tiny.store.clip_path(video_id, 0).unlink()
    tiny.note_clips()
    with pytest.raises(DataError, match=r"2 of 36 videos have no clip.*the first: .*video00000.*03_augmentation"):
        train(tiny.with_config(max_rejected_share=0.01))
    assert tiny.paths.metrics(STAGE, 0).read_bytes() == b""
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: said.append(caplog.text))
    try:
        outcome = train(tiny.with_config(epochs=1, shuffled_label_control=False))
    finally:
        hook.remove()
    assert all(video_id in said[0] for video_id in lost)
    assert outcome.missing == tuple(lost)
    assert not set(lost) & set(read_table(tiny.paths.predictions(0), PREDICTIONS)["video_id"])
