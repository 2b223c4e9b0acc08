"""Task video_text from pairs of clips and captions to retrieval, captions and results."""

import hashlib
import json
import math
from contextlib import nullcontext

import numpy as np
import polars as pl
import pytest
import torch

from fvc_lib.corpus.video_texts import index_video_texts
from fvc_lib.detectors.texts.tokenizer import TextTokenizer
from fvc_lib.engine.ranks import Ranks
from fvc_lib.engine.training_state import TrainingRecord
from fvc_lib.metrics.video_text import retrieval_metrics
from fvc_lib.services import memory as memory_policy
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, StoppedError, UsageError
from fvc_lib.services.parameters import resolve_config
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import CAPTIONS, RETRIEVAL_RANKS, VIDEO_TEXTS, frame_of, read_table, write_table
from fvc_lib.tasks.shared_training import read_outcome
from fvc_lib.tasks.video_text.results import read_embeddings
from fvc_lib.tasks.video_text.training import STAGE, check_config, read_parts, split_training, train_video_text
from fvc_lib.video.clips.store import ClipStore
from tests.kits.engine_kit import stop_after
from tests.kits.training import ListLog
from tests.kits.video_text_kit import video_text_results_of

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


@pytest.fixture(scope="module", autouse=True)
def no_frozen_garbage():
    """Two collections of a test process's whole heap would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_policy, "frozen_garbage", nullcontext)
        yield


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
    tokenizer = json.loads((paths.training_checkpoints(STAGE) / "tokenizer.json").read_bytes())
    texts = pairs.filter(part="train")["text"].unique()
    assert tokenizer["sha256"] == TextTokenizer.train(texts, config.vocabulary_size).fingerprint


def test_a_stopped_training_goes_on_to_the_same_numbers(run, trained):
    paths, config, _ = run
    with pytest.raises(StoppedError):
        train_video_text(paths, config, metric_log=ListLog(), stop=stop_after(4))
    assert not paths.stage_outcome(STAGE).exists()
    train_video_text(paths, config, metric_log=ListLog())
    ours, theirs = (read_embeddings(each.embeddings) for each in (paths, trained[0]))
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())
    assert paths.captions.read_bytes() == trained[0].captions.read_bytes()


@pytest.mark.parametrize(
    ("changes", "heights", "subjects"),
    [
        ({"contrastive_weight": 0.0}, (0, 12), {"captions"}),
        ({"caption_weight": 0.0, "contrastive_loss": "sigmoid"}, (19, 0), {"video_to_text", "text_to_video"}),
    ],
)
def test_a_loss_without_weight_leaves_nothing_to_measure(run, changes, heights, subjects):
    paths, config, _ = run
    config = config.model_copy(update=changes | {"epochs": 1})
    train_video_text(paths, config, metric_log=ListLog())
    written = read_table(paths.retrieval_ranks, RETRIEVAL_RANKS), read_table(paths.captions, CAPTIONS)
    assert tuple(table.height for table in written) == heights
    assert set(video_text_results_of(paths, config)["subject"]) == subjects


def test_what_the_weights_depend_on_is_in_the_fingerprint_and_nothing_else(run):
    paths, config, pairs = run

    def fingerprint(**changes):
        changed = config.model_copy(update=changes)
        return split_training(read_parts(paths, changed, Ranks()), changed).fingerprint

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
    read_parts(paths, config)
    assert not caplog.records
    read_parts(paths, config.model_copy(update={"max_text_tokens": 8}))
    (said,) = caplog.messages
    assert said.startswith("1 of 7 texts are longer than max_text_tokens 8 and are cut"), "the one of unknown words"
    write_table(pairs.filter(pl.col("part") != "validation"), VIDEO_TEXTS, paths.video_texts)
    with pytest.raises(DataError, match="no pair is left of the part validation"):
        read_parts(paths, config)


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
    write_table(index_video_texts(config).pairs, VIDEO_TEXTS, paths.video_texts)
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


def test_pairs_are_trained_on_from_a_stream_of_tar_files(run):
    paths, config, _ = run
    in_tars = config.model_copy(update={"clip_source": "stream", "num_workers": 1, "epochs": 1})
    stored, packed = (read_parts(paths, each).samples("train", each) for each in (config, in_tars))
    wanted, found = (data.__getitems__(range(24)) for data in (stored, packed))
    assert found.sample_ids == wanted.sample_ids
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in wanted.tensors.items())
    assert stored.stream is None
    assert packed.stream.buffer == 1000
    assert len(list(ClipStore.of(config).decode_folder.glob("shards_*/clips-*.tar"))) == 1
    log = ListLog()
    with pytest.raises(StoppedError):
        train_video_text(paths, in_tars, metric_log=log, stop=lambda: len(log.values("train", "learning_rate")) == 2)
    outcome = train_video_text(paths, in_tars, metric_log=log)
    steps = [step for step, _, phase, metric, _ in log.lines if (phase, metric) == ("train", "learning_rate")]
    assert steps == [1, 2, 3]
    assert (outcome.num_train, outcome.num_test) == (24, 13)
