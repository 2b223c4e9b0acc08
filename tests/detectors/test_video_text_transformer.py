import torch
from torch import nn

from fvc_lib.detectors.own.video_text import Attention, Transformer


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_attention_is_that_of_torch():
    torch.manual_seed(0)
    ours, theirs = Attention(8, 2), nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, torch.zeros(8), ours.value.bias]))
        theirs.out_proj.weight.copy_(ours.output.weight)
        theirs.out_proj.bias.copy_(ours.output.bias)
    asking, seen = random(3, 4, 8), random(3, 5, 8, seed=1)
    hidden = torch.zeros(3, 5, dtype=torch.bool)
    hidden[0, 3:] = hidden[2, 1] = True
    expected, _ = theirs(asking, seen, seen, key_padding_mask=hidden)
    torch.testing.assert_close(ours(asking, seen, hidden[:, None, :]), expected)


def test_what_is_hidden_changes_nothing():
    torch.manual_seed(0)
    transformer = Transformer(8, 2, 2, 6)
    positions, hidden = random(2, 6, 8), torch.zeros(2, 1, 6, dtype=torch.bool)
    hidden[:, :, 4:] = True
    other = positions.clone()
    other[:, 4:] = 9.0
    assert transformer(positions, hidden)[:, :4].equal(transformer(other, hidden)[:, :4])
    torch.testing.assert_close(transformer(positions, hidden)[:, :4], transformer(positions[:, :4]))


def test_a_causal_position_does_not_see_later_ones():
    torch.manual_seed(0)
    transformer = Transformer(8, 2, 2, 5, with_memory=True)
    positions, memory = random(1, 5, 8).requires_grad_(), random(1, 3, 8, seed=1).requires_grad_()
    later = torch.ones(1, 5, 5, dtype=torch.bool).triu(1)
    transformer(positions, later, memory)[:, 2].sum().backward()
    seen = positions.grad.abs().sum((0, 2)) > 0
    assert seen.tolist() == [True, True, True, False, False]
    assert (memory.grad.abs().sum(2) > 0).all()
