"""Task video_text: clips and samples, losses, and a training from pairs of clips and captions to results."""

import hashlib
import math
import shutil
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import safetensors.torch
import torch
from torch.nn import functional as F

from fvc_lib.corpus.video_texts import index_video_texts
from fvc_lib.detectors.own.video_text import positive_pairs
from fvc_lib.detectors.texts.tokenizer import TextTokenizer
from fvc_lib.engine.device import Precision, resolve_device
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.engine.ranks import Ranks
from fvc_lib.engine.step import BatchTransaction
from fvc_lib.engine.task import Batch
from fvc_lib.engine.training_state import TrainingRecord
from fvc_lib.metrics.video_text import retrieval_metrics
from fvc_lib.services.atomic_files import sha256_of_file
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, StoppedError, UsageError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import (
    CAPTIONS,
    RETRIEVAL_RANKS,
    TASK_RESULTS,
    VIDEO_TEXTS,
    check_table,
    frame_of,
    read_table,
    write_table,
)
from fvc_lib.tasks.shared_training import read_outcome
from fvc_lib.tasks.split_results import chance_metrics, chance_of_ranks, read_embeddings, video_text_results
from fvc_lib.tasks.video_text.training import (
    STAGE,
    VideoTextDataset,
    VideoTextOutputs,
    check_config,
    make_clips,
    numbered,
    retrieval_ranks,
    train_video_text,
    video_text_training,
)
from fvc_lib.video.clips.store import ClipStore
from fvc_lib.video.decode.clip import decode_clip
from tests.kits.engine_kit import stop_after
from tests.kits.split_runs import video_text_results_of
from tests.kits.training import ListLog
from tests.kits.video_text_kit import CONFIG, CPU, pairs, planned, tiny_task

# Clips and samples


CAPTION_OF = {"t0": "a red ring", "t1": "a blue ring 🙂", "t2": "something else"}
# (video, text): the first text stands beside two videos, the second video beside two texts.
PAIRS = ((0, "t0", "train"), (1, "t0", "train"), (1, "t1", "train"), (2, "t2", "test"), (3, "t1", "test"))


class Corpus:
    """Four videos, the table of their pairs, and their clips."""

    def __init__(self, folder: Path, make_video: Callable[..., Path]) -> None:
        self.root = folder / "corpus"
        self.paths = [make_video(self.root / f"video {number}.mp4", 20 + number) for number in range(4)]
        (self.root / "manifest.csv").write_text("path,text\n")
        self.config = RunConfig(
            task="video_text", model="frame_cnn", corpus=str(self.root), cache_dir=str(folder / "cache"), num_frames=3,
            fixed_size=16, workers=1, max_text_tokens=12,
        )  # fmt: skip
        hashes = [sha256_of_file(path) for path in self.paths]
        self.video_ids = [digest[:16] for digest in hashes]
        rows = [
            (f"{hashes[video][:16]}_{text}", hashes[video][:16], self.paths[video].name, text, CAPTION_OF[text],
             f"group {video}", part, "made", 8, None, hashes[video])
            for video, text, part in PAIRS
        ]  # fmt: skip
        self.pairs = numbered(check_table(frame_of(rows, VIDEO_TEXTS), VIDEO_TEXTS, "test"))
        assert make_clips(self.config, self.pairs) == []
        self.store, self.tokenizer = ClipStore.of(self.config), TextTokenizer.train(CAPTION_OF.values(), 300)

    def clip(self, video_id: str) -> list[list[int]]:
        frames = np.empty(self.store.shape, np.uint8)
        self.store.load(video_id, 0, frames)
        return frames.tolist()

    def batch(self, pairs: pl.DataFrame, *indices: int):
        return VideoTextDataset(self.store, pairs, self.tokenizer, self.config).__getitems__(indices)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, make_video: Callable[..., Path]) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("video_texts"), make_video)


def test_clips_are_made_once_and_are_the_originals(made):
    before = {path: path.stat().st_mtime_ns for path in Path(made.config.cache_dir).rglob("*.npy")}
    assert len(before) == 4
    seen = []
    make_clips(made.config, made.pairs, progress=lambda *done: seen.append(done))
    assert seen[-1] == (4, 4)
    assert {path: path.stat().st_mtime_ns for path in Path(made.config.cache_dir).rglob("*.npy")} == before
    assert made.clip(made.video_ids[2]) == decode_clip(made.paths[2], 3, 16).frames.tolist()


def test_a_sample_is_the_clip_the_tokens_and_the_numbers(made):
    batch = made.batch(made.pairs, *range(5))
    assert batch.sample_ids == tuple(made.pairs["pair_id"])
    assert {name: (t.dtype, tuple(t.shape)) for name, t in batch.tensors.items()} == {
        "frames": (torch.uint8, (5, 3, 3, 16, 16)),
        "tokens": (torch.int64, (5, 12)),
        "video_index": (torch.int64, (5,)),
        "text_index": (torch.int64, (5,)),
    }
    assert batch.tensors["frames"].tolist() == [made.clip(video_id) for video_id in made.pairs["video_id"]]
    assert batch.tensors["tokens"].equal(made.tokenizer.encode(made.pairs["text"].to_list(), 12))
    videos = batch.tensors["video_index"].tolist()
    assert batch.tensors["text_index"].tolist() == [0, 0, 1, 2, 1]
    assert [videos[1] == videos[2], len(set(videos)), min(videos), max(videos)] == [True, 4, 0, 3]
    # Numbers of a part are those of the whole table.
    test = made.batch(made.pairs.filter(part="test"), 0, 1)
    assert all(rows[3:].equal(test.tensors[name]) for name, rows in batch.tensors.items())
    shuffled = made.pairs.sample(fraction=1, shuffle=True, seed=1)
    assert numbered(shuffled).sort("pair_id").equals(made.pairs.sort("pair_id"))


def test_videos_that_cannot_be_decoded_are_named_and_left_out(tmp_path, made, caplog):
    root = Path(shutil.copytree(made.root, tmp_path / "copy"))
    (root / made.paths[1].name).write_bytes(b"changed since it was indexed")
    (root / made.paths[3].name).unlink()
    config = made.config.model_copy(update={"corpus": str(root), "cache_dir": str(tmp_path / "cache")})
    missing = make_clips(config, made.pairs)
    assert missing == sorted([made.video_ids[1], made.video_ids[3]])
    assert all(video_id in caplog.text for video_id in missing)
    assert "content has changed" in caplog.text
    with pytest.raises(DataError, match="2 of 4 videos have no clip"):
        make_clips(config.model_copy(update={"max_rejected_share": 0.4}), made.pairs)


def test_a_stopped_making_keeps_what_was_made(tmp_path, made):
    config, done = made.config.model_copy(update={"cache_dir": str(tmp_path)}), []

    def stopped(*so_far):
        done.append(so_far)
        raise StoppedError("as by a signal")

    with pytest.raises(StoppedError):
        make_clips(config, made.pairs, progress=stopped)
    assert done == [(1, 4)]
    assert len(list(tmp_path.rglob("*.npy"))) >= 1
    assert make_clips(config, made.pairs) == []


# Losses


VIDEOS, TEXTS = (5, 5, 2, 9, 7), (1, 3, 1, 4, 3)  # video 5 has two texts; texts 1 and 3 have two videos each


def built(task):
    with forked_random_state(0, CPU):
        return task.build_model()


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("micro_batch", [1, 4, 6])
def test_gradients_are_those_of_the_whole_batch_at_once(loss, micro_batch):
    """The oracle writes the sum of the losses down for six pairs, two of which have one text."""
    config = planned(contrastive_loss=loss, contrastive_weight=0.7, caption_weight=0.5)
    task, batch = tiny_task(config), pairs(config=config).whole()
    model, oracle = built(task), built(task)
    outputs = oracle(batch.tensors)
    positives = positive_pairs(batch.tensors["video_index"], batch.tensors["text_index"])
    similarities = oracle.joint.scale(outputs["video_embedding"], outputs["text_embedding"])
    wanted = positives.float()
    if loss == "softmax":
        ways = (similarities, wanted), (similarities.T, wanted.T)
        losses = [F.cross_entropy(rows, of / of.sum(1, keepdim=True), reduction="sum") for rows, of in ways]
        contrastive = 0.5 * sum(losses)
    else:
        contrastive = F.binary_cross_entropy_with_logits(similarities, wanted, reduction="sum")
    dense = (0.7 * contrastive + 0.5 * outputs["caption_loss"].sum()) / 6
    dense.backward()
    transaction = BatchTransaction(task, model, Precision(resolve_device("cpu", "off")), CPU)
    found = transaction.gradients(batch, micro_batch)
    assert found.loss.mean() == pytest.approx(float(dense.detach()), rel=1e-5)
    for (name, ours), theirs in zip(model.named_parameters(), oracle.parameters(), strict=True):
        assert float((ours.grad - theirs.grad).norm()) <= 1e-5 * float(theirs.grad.norm()), name


def test_every_sample_weighs_one_and_captions_are_written_only_when_asked_for():
    for changes in ({}, {"caption_weight": 0.0}, {"contrastive_weight": 0.0}):
        config = planned(**changes)
        task, batch = tiny_task(config), pairs(config=config).whole()
        loss = task.loss(task.forward(built(task), batch), batch)
        assert float(loss.weight) == 6
        assert (float(loss.total.detach()) == 0) is (not config.caption_weight)
    task, batch = tiny_task(), pairs().whole()
    model = built(task).eval()
    with torch.no_grad():
        assert "caption_tokens" not in task.forward(model, batch)
        task.writes_captions = True
        assert task.forward(model, batch)["caption_tokens"].shape == (6, 6)


def test_equal_texts_and_equal_videos_are_one_and_what_is_no_number_measures_nothing():
    bank = F.normalize(torch.randn(2, 10, 6, generator=torch.Generator().manual_seed(0)), dim=2)
    given = {
        "video_embedding": bank[0][list(VIDEOS)],
        "text_embedding": bank[1][list(TEXTS)],
        "caption_loss": torch.arange(5) / 4,
        "caption_tokens": torch.arange(15).reshape(5, 3).float(),
    }
    batch = Batch(tuple("abcde"), {"video_index": torch.tensor(VIDEOS), "text_index": torch.tensor(TEXTS)})
    whole, broken = VideoTextOutputs(), VideoTextOutputs()
    whole.update(given, batch)
    found = whole.retrieval_set()
    for name, numbers in (("video_embedding", VIDEOS), ("text_embedding", TEXTS)):
        first = [numbers.index(number) for number in sorted(set(numbers))]
        assert found[f"{name}s"].equal(given[name][first])
    ids = [(sorted(set(VIDEOS))[v], sorted(set(TEXTS))[t]) for v, t in found["pairs"].tolist()]
    assert sorted(ids) == sorted(zip(VIDEOS, TEXTS, strict=True))
    given["video_embedding"][2, 0] = math.nan
    broken.update(given, batch)
    metrics = broken.compute()
    assert set(metrics) == set(whole.compute())
    assert all(math.isnan(value) for name, value in metrics.items() if name != "caption_loss")


# Results


FEW_REPLICATES = CONFIG.model_copy(update={"bootstrap_replicates": 100})


def ndcg(ranks):
    ideal = sum(1 / np.log2(1 + rank) for rank in range(1, len(ranks) + 1))
    return sum(1 / np.log2(1 + rank) for rank in ranks) / ideal


@pytest.mark.parametrize(("candidates", "positives"), [(1, 1), (4, 1), (5, 2), (5, 4), (4, 4)])
def test_chance_is_the_mean_over_all_orders(candidates, positives):
    first, gains = [], []
    for order in permutations(range(candidates)):
        ranks = sorted(order.index(positive) + 1 for positive in range(positives))
        first.append(ranks[0])
        gains.append(ndcg(ranks))
    expected = np.bincount(first, minlength=candidates + 1)[1:] / len(first)
    np.testing.assert_allclose(chance_of_ranks(candidates, positives), expected, atol=1e-12)
    found = chance_metrics(candidates, np.array([positives] * 3), (1, 2, 9))
    assert found == pytest.approx(
        {
            "recall@1": np.mean(np.array(first) <= 1), "recall@2": np.mean(np.array(first) <= 2), "recall@9": 1.0,
            "mrr": np.mean(1 / np.array(first)), "ndcg": np.mean(gains), "mean_rank": np.mean(first),
            "median_rank": np.sort(first)[(len(first) - 1) // 2],
        }
    )  # fmt: skip


def test_every_number_stands_beside_its_control(tmp_path):
    """Four test videos of three texts, the third found wrongly; the last text stands beside two videos."""
    parts = [(1, "test"), (2, "test"), (3, "test"), (3, "test"), (9, "train"), (9, "train"), (1, "validation")]
    rows = [
        (f"pair{n}", f"video000{n}", f"{n}.mp4", f"text{t}", f"a {t} thing", f"group{n // 2}", part, "official", 12,
         None, f"{n:064d}")
        for n, (t, part) in enumerate(parts)
    ]  # fmt: skip
    pairs, texts = frame_of(rows, VIDEO_TEXTS), torch.eye(3)
    videos = torch.stack([texts[0], texts[1], 0.6 * texts[2] + 0.8 * texts[1], texts[2]])
    rows_of_pairs = torch.tensor([[0, 0], [1, 1], [2, 2], [3, 2]])
    retrieval = {"video_embeddings": videos, "text_embeddings": texts, "pairs": rows_of_pairs}
    ranks, embeddings = retrieval_ranks(pairs.filter(part="test"), retrieval), tmp_path / "test_embeddings.safetensors"
    safetensors.torch.save_file(retrieval, embeddings)
    written = [("a 1 thing", 1), ("a 9 thing", 2), ("", 3), ("a 3 thing", 3)]
    captions = frame_of(
        [(f"video000{n}", f"group{n // 2}", f"{n}.mp4", said, f"a {t} thing") for n, (said, t) in enumerate(written)],
        CAPTIONS,
    )
    results = check_table(video_text_results(pairs, ranks, captions, embeddings, FEW_REPLICATES), TASK_RESULTS, "test")
    found = {(row["source"], row["subject"], row["metric"]): row for row in results.iter_rows(named=True)}
    value = {key: row["value"] for key, row in found.items()}
    assert value["model", "video_to_text", "recall@1"] == 0.75
    assert value["model", "text_to_video", "recall@1"] == 1.0
    assert value["model", "video_to_text", "mrr"] == pytest.approx((3 + 1 / 2) / 4)
    assert value["model", "video_to_text", "mean_positive_similarity"] == pytest.approx((3 + 0.6) / 4)
    assert value["chance", "video_to_text", "recall@1"] == pytest.approx(1 / 3)
    assert value["chance", "text_to_video", "recall@1"] == pytest.approx((1 / 4 + 1 / 4 + 2 / 4) / 3)
    assert value["model", "captions", "exact_match"] == 0.5
    assert value["most_frequent_caption", "captions", "exact_match"] == 0.0
    assert value["most_frequent_caption", "captions", "token_f1"] == pytest.approx(2 / 3)
    row = found["model", "video_to_text", "recall@1"]
    assert row["low"] <= row["value"] <= row["high"]
    assert (row["num_samples"], row["num_groups"]) == (4, 2)
    assert found["model", "text_to_video", "recall@1"]["num_samples"] == 3
    for name in {metric for source, _, metric in found if source == "model"} - {"mean_positive_similarity"}:
        assert any(source != "model" and metric == name for source, _, metric in found), name


# Training


COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220)}
SIDES = ("left", "right")


def drawn(colour: str, side: str, number: int, num_frames: int) -> np.ndarray:
    """A square of a colour at one side of a grey ground, uint8 (T, 3, 16, 16)."""
    frames = np.full((num_frames, 3, 16, 16), 90 + 10 * (number % 4), np.uint8)
    column = (1 if side == "left" else 9) + number % 2
    frames[:, :, 4:12, column : column + 6] = np.array(COLOURS[colour], np.uint8)[None, :, None, None]
    return frames


def written_corpus(paths: RunPaths, config: RunConfig) -> pl.DataFrame:
    """Pairs of 16-px clips, already in the clip store, and their captions; every text stands beside several videos."""
    store, rows = ClipStore.of(config), []
    parts = ["train"] * 4 + ["validation"] + ["test"] * 2
    samples = [
        (part, repeat, colour, side) for repeat, part in enumerate(parts) for colour in COLOURS for side in SIDES
    ]
    for number, (part, repeat, colour, side) in enumerate(samples):
        video_id, text = f"video{number:04d}", f"a {colour} square on the {side}"
        if not store.has(video_id, 0):
            store.write(video_id, 0, drawn(colour, side, number + repeat, config.num_frames))
        digests = [hashlib.sha256(name.encode()).hexdigest() for name in (text, video_id)]
        rows.append(
            (f"pair{number:04d}", video_id, f"{video_id}.mp4", digests[0], text, f"group{number}", part, "official",
             12, None, digests[1])
        )  # fmt: skip
    # A second text beside the first test video.
    first = next(row for row in rows if row[6] == "test")
    rows.append(("pair9999", *first[1:3], "0" * 64, "something red", *first[5:]))
    pairs = frame_of(rows, VIDEO_TEXTS)
    write_table(pairs, VIDEO_TEXTS, paths.video_texts)
    return pairs


def tiny_config(folder, **changes) -> RunConfig:
    values = {
        "task": "video_text", "corpus": str(folder / "manifest.csv"), "cache_dir": str(folder / "cache"),
        "runs_dir": str(folder), "data_dir": str(folder), "num_frames": 2, "fixed_size": 16, "epochs": 2,
        "embedding_size": 8, "max_text_tokens": 16,
        "effective_batch_size": 8, "batch_size": 8, "memory_preflight": False, "bootstrap_replicates": 100,
        "device": "cpu",
    }  # fmt: skip
    (folder / "manifest.csv").touch()
    return resolve_config(values | changes, environ={})


@pytest.fixture
def run(tmp_path):
    paths, config = RunPaths(tmp_path / "run"), tiny_config(tmp_path)
    return paths, config, written_corpus(paths, config)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder, log = tmp_path_factory.mktemp("trained"), ListLog()
    paths, config = RunPaths(folder / "run"), tiny_config(folder)
    pairs = written_corpus(paths, config)
    return paths, config, pairs, train_video_text(paths, config, metric_log=log), log


def test_a_training_writes_what_the_test_part_gave(trained):
    paths, config, pairs, outcome, log = trained
    assert outcome == read_outcome(paths.stage_outcome(STAGE), TrainingRecord)
    assert (outcome.num_train, outcome.num_validation, outcome.num_test) == (24, 6, 13)

    test = pairs.filter(part="test")
    ranks, captions = read_table(paths.retrieval_ranks, RETRIEVAL_RANKS), read_table(paths.captions, CAPTIONS)
    by_video, by_text = (ranks.filter(direction=name) for name in ("video_to_text", "text_to_video"))
    assert by_video["query_id"].to_list() == sorted(set(test["video_id"]))
    assert by_text["query_id"].to_list() == sorted(set(test["text_id"]))
    assert set(by_video["num_candidates"]) == {7}
    assert by_video["num_positives"].to_list() == [2] + [1] * 11
    assert by_text.filter(query_id="0" * 64)["num_positives"].to_list() == [1]
    groups = dict(test.select("video_id", "group_id").iter_rows())
    assert by_video["group_id"].to_list() == [groups[video] for video in by_video["query_id"]]

    stored = read_embeddings(paths.embeddings)
    again = retrieval_metrics(stored["video_embeddings"], stored["text_embeddings"], stored["pairs"])
    assert again["video_to_text"].ranks.tolist() == by_video["rank"].to_list()
    assert again["text_to_video"].ranks.tolist() == by_text["rank"].to_list()
    assert log.values("test", "text_to_video/recall@1") == [again["text_to_video"].metrics["recall@1"]]

    assert captions["video_id"].to_list() == sorted(set(test["video_id"]))
    assert set(captions["references"][0].split("\n")) == {"a red square on the left", "something red"}
    tokenizer = TextTokenizer.load(paths.training_checkpoints(STAGE) / "tokenizer.json")
    texts = pairs.filter(part="train")["text"].unique()
    assert tokenizer.fingerprint == TextTokenizer.train(texts, config.vocabulary_size).fingerprint


def test_a_stopped_training_goes_on_to_the_same_numbers(run, trained):
    paths, config, _ = run
    with pytest.raises(StoppedError):
        train_video_text(paths, config, metric_log=ListLog(), stop=stop_after(4))
    assert not paths.stage_outcome(STAGE).exists()
    train_video_text(paths, config, metric_log=ListLog())
    ours, theirs = (read_embeddings(each.embeddings) for each in (paths, trained[0]))
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())
    assert paths.captions.read_bytes() == trained[0].captions.read_bytes()


def test_what_the_weights_depend_on_is_in_the_fingerprint_and_nothing_else(run):
    paths, config, pairs = run

    def fingerprint(**changes):
        changed = config.model_copy(update=changes)
        return video_text_training(paths, changed, Ranks()).fingerprint

    changes = {
        "contrastive_loss": "sigmoid", "contrastive_weight": 2.0, "caption_weight": 0.5, "embedding_size": 16,
        "max_text_tokens": 8, "vocabulary_size": 300, "model": "r2plus1d_small", "effective_batch_size": 4, "seed": 1,
        "epochs": 3, "learning_rate": 0.1,
    }  # fmt: skip
    found = [fingerprint(**{name: value}) for name, value in changes.items()]
    assert len({*found, fingerprint()}) == len(found) + 1
    assert fingerprint(batch_size=2, num_ranks=2) == fingerprint()
    write_table(pairs.with_columns(pl.col("text").str.replace("red", "pink")), VIDEO_TEXTS, paths.video_texts)
    assert fingerprint() not in {*found, config.config_hash}


def test_texts_that_are_cut_are_counted_and_a_part_without_a_clip_is_named(run, caplog):
    paths, config, pairs = run
    video_text_training(paths, config)
    assert not caplog.records
    video_text_training(paths, config.model_copy(update={"max_text_tokens": 8}))
    (said,) = caplog.messages
    assert said.startswith("1 of 7 texts are longer than max_text_tokens 8 and are cut"), "the one of unknown words"
    write_table(pairs.filter(pl.col("part") != "validation"), VIDEO_TEXTS, paths.video_texts)
    with pytest.raises(DataError, match="no pair is left of the part validation"):
        video_text_training(paths, config)


def test_what_does_not_go_together_is_refused_before_anything_is_made(tmp_path):
    for change, message in (
        ({"contrastive_weight": 0.0, "caption_weight": 0.0}, "are both 0"),
        ({"model_weights": "/nowhere"}, "model_weights '/nowhere': no such file or folder"),
        ({"model_weights": __file__}, "model_weights .*: neither weights of torch.save nor safetensors"),
        ({"text_encoder": "/nowhere"}, "wanted own or the folder of a transformers model"),
    ):
        with pytest.raises(UsageError, match=message):
            check_config(tiny_config(tmp_path, **change))


@pytest.mark.long
def test_clips_and_captions_of_the_sample_corpus_are_learned(tmp_path):
    """The built-in clips: 64 captions of the test part were never read in training, every pair of their words was."""
    config = resolve_config(
        {
            "task": "video_text", "fixed_size": 64, "max_text_tokens": 16, "batch_size": 32, "epochs": 40,
            "data_dir": str(tmp_path), "cache_dir": str(tmp_path / "cache"), "runs_dir": str(tmp_path),
        },
        environ={},
    )  # fmt: skip
    paths = RunPaths(tmp_path / "run")
    write_table(index_video_texts(config).rows, VIDEO_TEXTS, paths.video_texts)
    train_video_text(paths, config, metric_log=ListLog())
    results = video_text_results_of(paths, config)
    found = {(row["source"], row["subject"], row["metric"]): row["value"] for row in results.iter_rows(named=True)}
    assert read_table(paths.retrieval_ranks, RETRIEVAL_RANKS)["num_candidates"].to_list().count(64) == 72
    for direction in ("video_to_text", "text_to_video"):
        assert found["model", direction, "recall@1"] >= 0.9
        assert found["chance", direction, "recall@1"] < 0.02
    assert found["model", "captions", "content_word_recall"] >= 0.85
    assert found["most_frequent_caption", "captions", "content_word_recall"] < 0.5
    assert not math.isnan(found["model", "captions", "bleu4"])


@pytest.mark.slow
def test_pairs_are_trained_on_from_tar_files(run):
    paths, config, _ = run
    in_tars = config.model_copy(update={"clip_source": "shards", "num_workers": 1, "epochs": 1})
    stored, packed = (video_text_training(paths, each).task.training_data for each in (config, in_tars))
    wanted, found = (data.__getitems__(range(24)) for data in (stored, packed))
    assert found.sample_ids == wanted.sample_ids
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in wanted.tensors.items())
    assert len(list(ClipStore.of(config).decode_folder.glob("shards_*/clips-*.tar"))) == 1
    log = ListLog()
    with pytest.raises(StoppedError):
        train_video_text(paths, in_tars, metric_log=log, stop=lambda: len(log.values("train", "learning_rate")) == 2)
    outcome = train_video_text(paths, in_tars, metric_log=log)
    steps = [step for step, _, phase, metric, _ in log.lines if (phase, metric) == ("train", "learning_rate")]
    assert steps == [1, 2, 3]
    assert (outcome.num_train, outcome.num_test) == (24, 13)
