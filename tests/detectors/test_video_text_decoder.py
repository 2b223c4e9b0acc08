import pytest
import torch

from fvc_lib.detectors.own.video_text import CaptionDecoder
from fvc_lib.detectors.texts.tokenizer import BEGIN, END, MASK, PAD


def decoder(vocabulary_size: int = 7, max_tokens: int = 6, sharpness: float = 12.0, seed: int = 0) -> CaptionDecoder:
    """Return an untrained decoder whose outputs differ enough to show a wrong choice."""
    torch.manual_seed(seed)
    made = CaptionDecoder(vocabulary_size, max_tokens, width=8, heads=2, layers=1).eval()
    with torch.no_grad():
        made.embedding.weight.mul_(sharpness)
        # The clip must count more than the last token, which the decoder would only repeat.
        made.transformer.layers[0].memory_attention.output.weight.mul_(10)
    return made


def memories(batch: int = 4, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(batch, 3, 8, generator=torch.Generator().manual_seed(seed))


def following(made: CaptionDecoder, tokens: list[int], memory: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities (V,) of the next token; padding, beginning and mask are excluded."""
    with torch.no_grad():
        logits = made(torch.tensor([tokens]), memory[None])[0, -1]
    found = logits.double().log_softmax(0)
    found[[PAD, BEGIN, MASK]] = -torch.inf
    return found


def greedily(made, memory, max_tokens):
    tokens = [BEGIN]
    while len(tokens) < max_tokens and tokens[-1] != END:
        tokens.append(int(following(made, tokens, memory).argmax()))
    return tokens + [PAD] * (max_tokens - len(tokens))


def test_the_score_is_the_mean_over_a_text_s_own_tokens():
    made, memory = decoder(), memories(3)
    tokens = torch.tensor([[1, 6, 4, 2, 0, 0], [1, 2, 0, 0, 0, 0], [1, 5, 6, 5, 4, 2]])
    score = made.score(tokens, memory)
    for row, (text, clip) in enumerate(zip(tokens.tolist(), memory, strict=True)):
        losses, right = [], []
        for place in range(1, 6):
            if text[place] == PAD:
                break
            logits = made(torch.tensor([text[:place]]), clip[None])[0, -1].detach()
            losses.append(-float(logits.log_softmax(0)[text[place]]))
            right.append(int(logits.argmax()) == text[place])
        assert float(score["caption_loss"][row].detach()) == pytest.approx(sum(losses) / len(losses), rel=1e-5)
        assert float(score["token_accuracy"][row]) == pytest.approx(sum(right) / len(right))


def test_captions_are_written_greedily():
    made, memory = decoder(sharpness=25), memories(12)
    found = made.write(memory).tolist()
    assert found == [greedily(made, clip, 6) for clip in memory]
    lengths = {len([token for token in text if token != PAD]) for text in found}
    assert len(lengths) > 1, "texts of one length show little"


def test_a_caption_does_not_depend_on_its_batch():
    made, memory = decoder(sharpness=25), memories(8)
    together = made.write(memory)
    assert together.equal(torch.cat([made.write(clip[None]) for clip in memory]))


def test_marks_that_are_no_text_are_never_written():
    made = decoder(sharpness=25)
    with torch.no_grad():
        made.embedding.weight[MASK] = made.embedding.weight[4:].mean(0) * 9  # which would be the most probable
    assert MASK not in made.write(memories(12))
