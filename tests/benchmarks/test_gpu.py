"""The benchmark on a GPU, as far as a CPU can run it: its networks are the published ones', its arithmetic is right."""

import torch

from benchmarks.gpu import NETWORKS, covered, main
from fvc_lib.engine.promises.trainings import SmallNet

# Without the last layer: VideoMAE-base as a classifier (transformers, tubes of 2 x 16 x 16; its attention has no bias
# for keys) and torchvision's r2plus1d_18.
PARAMETERS = {"videomae-base": 86_236_416, "r2plus1d_18": 31_300_125}


def test_the_networks_have_about_as_many_parameters_as_the_published_ones():
    for name, build in NETWORKS.items():
        with torch.device("meta"):
            model = build()
        trunk = sum(each.numel() for part, each in model.named_parameters() if not part.startswith("head"))
        assert abs(trunk / PARAMETERS[name] - 1) < 1e-3, (name, trunk)


def test_kernels_at_the_same_time_count_once():
    assert covered([(5, 6), (0, 2), (1, 3), (2.5, 2.75)]) == 4
    assert covered([]) == 0


def test_it_runs_on_a_cpu_where_that_is_asked_for(capsys, monkeypatch):
    monkeypatch.setitem(NETWORKS, "small", SmallNet)
    small = "--device cpu --networks small --steps 2 --warmup 1 --rounds 1 --batch 2 --frames 2 --side 16 --workers 0"
    assert main([*small.split(), "--only", "engine", "accelerations", "stem"]) == 0
    shown = capsys.readouterr().out
    assert "ratio" in shown
    assert "channels_last, fused_adamw" in shown
    assert "16 at once" in shown
