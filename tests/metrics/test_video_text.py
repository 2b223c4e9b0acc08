import math

import numpy as np
import pytest

from fvc_lib.metrics.intervals import mean_measure
from fvc_lib.metrics.video_text import (
    bleu4_measure,
    content_word_recall,
    content_words,
    retrieval_metrics,
    token_f1,
    words,
)

KS = (1, 3, 1000)


def naive_retrieval(similarities: np.ndarray, pairs: set[tuple[int, int]]) -> dict[str, object]:
    """One direction from the dense matrix of all similarities, candidate by candidate."""
    ranks, gains = {}, []
    for query in sorted({query for query, _ in pairs}):
        right = sorted({candidate for asked, candidate in pairs if asked == query})
        wrong = [x for candidate, x in enumerate(similarities[query]) if candidate not in right]
        own = sorted((similarities[query][candidate] for candidate in right), reverse=True)
        ranks[query] = [place + sum(x >= value for x in wrong) for place, value in enumerate(own, 1)]
        gain = sum(1 / math.log2(1 + rank) for rank in ranks[query])
        gains.append(gain / sum(1 / math.log2(1 + place) for place in range(1, len(right) + 1)))
    best = np.array([of_query[0] for of_query in ranks.values()])
    metrics = {f"recall@{k}": (best <= k).mean() for k in KS}
    metrics |= {"median_rank": np.median(best), "mean_rank": best.mean(), "mrr": (1 / best).mean()}
    metrics |= {"ndcg": np.mean(gains), "mean_positive_similarity": np.mean([similarities[pair] for pair in pairs])}
    return {
        "queries": list(ranks),
        "ranks": best.tolist(),
        "num_positives": [len(of_query) for of_query in ranks.values()],
        "metrics": pytest.approx(metrics),
    }


def pairs_of(text_of_video: np.ndarray) -> np.ndarray:
    return np.stack([np.arange(len(text_of_video)), text_of_video], axis=1)


def check_against_naive(videos: np.ndarray, texts: np.ndarray, given: np.ndarray) -> None:
    pairs = {tuple(pair) for pair in given.tolist()}
    dense = videos.astype(np.float64) @ texts.astype(np.float64).T
    found = retrieval_metrics(videos, texts, given, KS)
    for direction, oracle in (
        ("video_to_text", naive_retrieval(dense, pairs)),
        ("text_to_video", naive_retrieval(dense.T, {(text, video) for video, text in pairs})),
    ):
        ours = found[direction]
        assert (ours.queries.tolist(), ours.ranks.tolist()) == (oracle["queries"], oracle["ranks"])
        assert ours.num_positives.tolist() == oracle["num_positives"]
        assert ours.metrics == oracle["metrics"]


@pytest.mark.parametrize("block", [5, 1024])
@pytest.mark.parametrize("kind", ["normal", "with ties", "collapsed", "of very different norms"])
def test_every_metric_is_that_of_the_dense_matrix(kind, block, monkeypatch) -> None:
    monkeypatch.setattr("fvc_lib.metrics.video_text._BLOCK", block)
    generator = np.random.default_rng(0)
    for num_videos, num_texts, dimensions in ((1, 1, 1), (24, 5, 3), (20, 12, 16)):
        rows = generator.normal(size=(num_videos + num_texts, dimensions)).astype(np.float32)
        if kind == "with ties":
            rows = np.round(rows)
        elif kind == "collapsed":
            rows[:] = np.round(rows[0])
        elif kind == "of very different norms":
            rows *= np.float32(10.0) ** generator.integers(-6, 7, (len(rows), 1))
        videos, texts = rows[:num_videos], rows[num_videos:]
        check_against_naive(videos, texts, pairs_of(generator.integers(0, num_texts, num_videos)))
        several = np.stack([generator.integers(0, size, 15) for size in (num_videos, num_texts)], axis=1)
        check_against_naive(videos, texts, several)  # a video may have several texts or none


def test_collapsed_embeddings_come_last_and_not_first() -> None:
    found = retrieval_metrics(np.ones((12, 5)), np.ones((4, 5)), pairs_of(np.arange(12) % 3), (1, 3, 4))
    assert [found["video_to_text"].metrics[f"recall@{k}"] for k in (1, 3, 4)] == [0, 0, 1]
    assert set(found["text_to_video"].ranks) == {9}  # behind the eight videos of others
    # The same sums in another order: float64 rounds them differently, and they are ties all the same.
    generator = np.random.default_rng(3)
    rows = (generator.normal(size=(1, 64)) * 10.0 ** generator.integers(-6, 7, 64)).astype(np.float32)
    texts = np.concatenate([rows[:, generator.permutation(64)] for _ in range(20)])
    videos = np.full((20, 64), 0.1, dtype=np.float32)
    assert len(set(np.vecdot(videos.astype(np.float64), texts.astype(np.float64)))) > 1
    assert set(retrieval_metrics(videos, texts, pairs_of(np.arange(20)))["video_to_text"].ranks) == {20}


@pytest.mark.parametrize(
    ("videos", "texts", "pairs", "message"),
    [
        ([[1, 1], [1, np.nan], [1, 1]], np.ones((2, 2)), [[0, 1]], "video_embeddings"),
        (np.ones((3, 2)), np.full((2, 2), -np.inf), [[0, 1]], "text_embeddings"),
        (np.ones((3, 2)), np.full((2, 2), -1e20), [[0, 1]], "up to 1e15"),
        (np.ones((3, 0)), np.ones((2, 0)), [[0, 1]], r"video_embeddings: got shape \(3, 0\)"),
        (np.ones((3, 2)), np.ones((2, 4)), [[0, 1]], "mismatch in its core dimension"),
        (np.ones((3, 2)), np.ones((2, 2)), [[0, 2]], "3 videos and 2 texts"),
        (np.ones((3, 2)), np.ones((2, 2)), [[0, -1]], "3 videos and 2 texts"),
    ],
)
def test_bad_input_is_refused(videos, texts, pairs, message) -> None:
    with pytest.raises(ValueError, match=message):
        retrieval_metrics(np.array(videos), np.array(texts), pairs)


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


@pytest.mark.parametrize("block", [1, 7, 1024])
def test_rounding_of_float32_decides_no_rank(block, monkeypatch):
    """Ranks are those of float64 also where float32 cannot tell similarities apart, or loses them as too small."""
    monkeypatch.setattr("fvc_lib.metrics.video_text._BLOCK", block)
    draw = np.random.default_rng(0)
    texts, noise = draw.standard_normal((9, 5)), draw.standard_normal((30, 5))
    own = np.arange(30) % 9
    videos = texts[own] + noise
    for a, b in ((1 + 1e-6 * videos, 1 + 1e-6 * texts), (1e-23 * videos, 1e-23 * texts)):
        a, b = a.astype(np.float32), b.astype(np.float32)
        exact = a.astype(np.float64) @ b.astype(np.float64).T
        limit = exact[np.arange(30), own] * (1 - 1e-14 * np.sign(exact[np.arange(30), own]))
        wanted = (exact >= limit[:, None]).sum(axis=1)
        plain = a @ b.T
        assert ((plain >= plain[np.arange(30), own][:, None]).sum(axis=1) != wanted).any()
        assert (retrieval_metrics(a, b, pairs_of(own))["video_to_text"].ranks == wanted).all()
