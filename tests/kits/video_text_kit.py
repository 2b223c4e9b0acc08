"""Tiny networks and made-up pairs of clips and texts for the tests of task video_text."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from fvc_lib.detectors.own.transformer import TokenNumbers
from fvc_lib.detectors.own.video_text import NetworkPlan, VideoTextNetwork
from fvc_lib.detectors.packages import mend_torchvision
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.engine.task import Batch, Sample
from fvc_lib.services.config import RunConfig
from fvc_lib.tasks.video_text.task import VideoTextTask

CPU = torch.device("cpu")
WORDS = ("a", "red", "green", "blue", "square", "circle", "on", "over", "the", "left", "right", "moves", "field")
NUMBERS = TokenNumbers(padding=0, begin=1, end=2)
PLAN = NetworkPlan(
    trunk="frame_cnn",
    num_frames=3,
    vocabulary_size=11,
    max_tokens=6,
    numbers=NUMBERS,
    embedding_size=8,
    width=16,
    layers=1,
    heads=2,
    text_encoder="",
    contrastive="softmax",
    num_together=8,
    captions=True,
)
CONFIG = RunConfig(task="video_text")


def network(plan: NetworkPlan = PLAN, seed: int = 0) -> VideoTextNetwork:
    with forked_random_state(seed, CPU):
        return VideoTextNetwork(plan)


@dataclass(frozen=True)
class MadeUpPairs:
    """Pairs whose clip and text follow from numbers: equal video numbers give equal clips, so do texts."""

    videos: tuple[int, ...]
    texts: tuple[int, ...]
    plan: NetworkPlan = PLAN
    side: int = 16

    classes = None

    def __len__(self):
        return len(self.videos)

    def __getitem__(self, index):
        batch = self.__getitems__([index])
        return Sample(batch.sample_ids[0], {name: tensor[0] for name, tensor in batch.tensors.items()})

    def __getitems__(self, indices):
        videos, texts = [self.videos[i] for i in indices], [self.texts[i] for i in indices]
        tensors = {
            "frames": torch.stack([_clip(video, self.plan.num_frames, self.side) for video in videos]),
            "tokens": torch.stack([_tokens(text, self.plan.max_tokens, self.plan.vocabulary_size) for text in texts]),
            "video_index": torch.tensor(videos),
            "text_index": torch.tensor(texts),
        }
        return Batch(tuple(f"pair_{i}" for i in indices), tensors)

    def whole(self) -> Batch:
        return self.__getitems__(range(len(self)))


@cache
def _clip(video, num_frames, side):
    generator = torch.Generator().manual_seed(video)
    return torch.randint(0, 256, (num_frames, 3, side, side), dtype=torch.uint8, generator=generator)


@cache
def _tokens(text, max_tokens, vocabulary_size):
    """Of 0 to ``max_tokens - 2`` tokens between beginning and end."""
    generator = torch.Generator().manual_seed(1000 + text)
    length = text % (max_tokens - 1)
    tokens = torch.zeros(max_tokens, dtype=torch.int64)
    tokens[0] = NUMBERS.begin
    tokens[1 : 1 + length] = torch.randint(3, vocabulary_size, (length,), generator=generator)
    tokens[1 + length] = NUMBERS.end
    return tokens


def pairs(number: int = 6, plan: NetworkPlan = PLAN) -> MadeUpPairs:
    """``number`` pairs, the last of which has the first one's text."""
    return MadeUpPairs(tuple(range(number)), (*range(number - 1), 0), plan)


def tiny_task(plan: NetworkPlan = PLAN, training=None, validation=None, **settings) -> VideoTextTask:
    settings |= {"contrastive_weight": float(plan.contrastive is not None), "caption_weight": float(plan.captions)}
    config = CONFIG.model_copy(update=settings)
    return VideoTextTask(training or pairs(plan=plan), validation or pairs(plan=plan), plan, config)


def planned(**changes) -> NetworkPlan:
    return replace(PLAN, **changes)


def write_tiny_bert(folder: Path) -> str:
    """A BERT of two layers and its tokenizer of words, untrained, as ``save_pretrained`` leaves them."""
    mend_torchvision()  # where it is installed beside CPU torch, transformers imports it
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    marks = ["[PAD]", "[UNK]"]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate((*marks, *WORDS))}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    settings = BertConfig(
        vocab_size=len(marks) + len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32, type_vocab_size=1, hidden_dropout_prob=0.5,
    )  # fmt: skip
    with forked_random_state(0, CPU):
        BertModel(settings).save_pretrained(folder)
    return str(folder)
