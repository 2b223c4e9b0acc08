import math

import numpy as np
import pytest

from fvc_lib.metrics.intervals import mean_measure
from fvc_lib.metrics.video_text import (
    bleu4_measure,
    content_word_recall,
    content_words,
    token_f1,
    words,
)


def value(measure, rows, weights=None):
    nothing = np.zeros(rows)
    return measure(nothing, nothing) if weights is None else measure(nothing, nothing, weights)


def test_words_are_runs_of_letters_and_digits_of_any_script():
    assert words("A red-circle, 2 Größen; 漢字!") == ["a", "red", "circle", "2", "größen", "漢字"]
    assert words("  ...  ") == []


@pytest.mark.parametrize(
    ("caption", "references", "expected"),
    [
        ("a red circle", ["a red circle"], 1.0),
        ("a red circle", ["a blue circle"], 2 / 3),
        ("a a a", ["a b"], 2 * 1 / 5),  # a repeated word is found once
        ("a red circle", ["nothing", "red circle"], 2 * 2 / 5),
        ("", ["a"], 0.0),
        ("a", [], 0.0),
    ],
)
def test_token_f1_is_that_of_the_best_reference(caption, references, expected):
    assert token_f1(caption, references) == pytest.approx(expected)


def test_content_is_what_tells_texts_apart():
    texts = ["a red circle", "a blue circle", "a blue square"]
    assert content_words(texts) == {"red", "square"}, "of three texts more than half are two"
    assert content_word_recall("red", ["a red circle"], {"red", "circle"}) == 0.5
    assert content_word_recall("red", ["a red circle", "the red"], {"red", "circle"}) == 1.0
    assert math.isnan(content_word_recall("red", ["a"], {"red"}))


def naive_bleu(captions, references):
    """After the formula of the paper, sentence by sentence and n-gram by n-gram."""
    logs = []
    for n in range(1, 5):
        matched = total = 0
        for caption, its in zip(captions, references, strict=True):
            said = caption.split()
            grams = [tuple(said[i : i + n]) for i in range(len(said) - n + 1)]
            total += len(grams)
            for gram in set(grams):
                most = max(sum(tuple(r.split()[i : i + n]) == gram for i in range(len(r.split()) - n + 1)) for r in its)
                matched += min(grams.count(gram), most)
        if not matched:
            return 0.0
        logs.append(math.log(matched / total))
    said = sum(len(caption.split()) for caption in captions)
    near = sum(
        min((len(r.split()) for r in its), key=lambda size: (abs(size - len(c.split())), size))
        for c, its in zip(captions, references, strict=True)
    )
    return math.exp(sum(logs) / 4) * (1 if said > near else math.exp(1 - near / said))


CAPTIONS = ["a red circle moves left over a field", "a ring moves", "a blue blue blue square moves up slowly there"]
REFERENCES = [
    ["a red circle moves right over a field", "the red circle moves left"],
    ["a ring moves down over a road"],
    ["a blue square moves up", "one blue square moves up slowly there now"],
]


def test_bleu_is_that_of_the_paper():
    assert value(bleu4_measure(CAPTIONS, REFERENCES), 3) == pytest.approx(naive_bleu(CAPTIONS, REFERENCES))
    perfect = [reference[0] for reference in REFERENCES]
    assert value(bleu4_measure(perfect, REFERENCES), 3) == pytest.approx(1.0)
    assert value(bleu4_measure(["x", "", "y"], REFERENCES), 3) == 0.0


def test_a_mean_leaves_out_what_is_undefined():
    measure = mean_measure("share", [1.0, math.nan, 0.0, 1.0])
    assert value(measure, 4) == pytest.approx(2 / 3)
    assert value(measure, 4, [[1, 5, 0, 0], [0, 1, 0, 0]]).tolist() == pytest.approx([1.0, math.nan], nan_ok=True)
    assert measure.__name__ == "share"
