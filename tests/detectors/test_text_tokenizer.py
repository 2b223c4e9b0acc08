import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from fvc_lib.corpus.samples.drawings import plan_clips
from fvc_lib.detectors.texts.tokenizer import BEGIN, END, MASK, PAD, SMALLEST_VOCABULARY, TextTokenizer

CAPTIONS = sorted({clip.caption for clip in plan_clips()})
ODD = (
    "<end> and <pad>",
    "🙂 a family 👨‍👩‍👧",
    "سلام دنیا",
    "line\nbreak\r\n\ttab",
    "  spaces  ",
    "\0",
    "é e\u0301",
    "[MASK]",
    "",
)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.train(CAPTIONS, 320)


def test_the_special_ids_are_the_marks_and_nothing_else(tokenizer):
    assert (PAD, BEGIN, END, MASK) == (0, 1, 2, 3)
    ids = tokenizer.encode(["a red circle", *ODD], 64)
    assert ids.dtype == torch.int64
    assert ids.shape == (len(ODD) + 1, 64)
    for row in ids.tolist():
        length = row.index(END) + 1
        assert row[0] == BEGIN
        assert set(row[length:]) <= {PAD}
        assert all(4 <= number < tokenizer.vocabulary_size for number in row[1 : length - 1])


@given(st.text())
@settings(max_examples=40)
@example("<pad><begin></s>")
def test_any_text_comes_back_unchanged(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode([text], 600)[0]) == text


def test_a_text_cut_off_keeps_its_beginning_and_its_end(tokenizer):
    whole = tokenizer.encode([CAPTIONS[0]], 40)[0]
    length = tokenizer.num_tokens([CAPTIONS[0]])[0]
    assert whole[length - 1] == END
    for max_tokens in range(2, length + 3):
        cut = tokenizer.encode([CAPTIONS[0]], max_tokens)[0]
        kept = min(max_tokens, length) - 1
        assert cut[:kept].tolist() == whole[:kept].tolist()
        assert cut[kept:].tolist() == [END] + [PAD] * (max_tokens - kept - 1)


def test_reading_stops_at_the_end_and_passes_over_other_marks(tokenizer):
    words = tokenizer.encode(["a ring"], 10)[0].tolist()
    inner = words[1 : words.index(END)]
    assert tokenizer.decode([BEGIN, PAD, MASK, *inner, END, *inner]) == "a ring"
    assert tokenizer.decode([]) == tokenizer.decode([END, *inner]) == ""
    assert tokenizer.decode(tokenizer.encode(["é"], 8)[0, :2]) == "\ufffd"  # half of a letter's bytes


def test_the_vocabulary_is_what_was_asked_for_and_words_become_tokens(tokenizer):
    assert tokenizer.vocabulary_size == 320
    every = TextTokenizer.train(CAPTIONS, 2000)
    assert every.vocabulary_size < 500  # there are no more pairs to merge
    assert every.num_tokens(["a red circle moves left over a green field"]) == [9 + 2]
    nothing = TextTokenizer.train([], 2000)
    assert nothing.vocabulary_size == SMALLEST_VOCABULARY
    assert nothing.decode(nothing.encode(["a ring ☂"], 32)[0]) == "a ring ☂"
