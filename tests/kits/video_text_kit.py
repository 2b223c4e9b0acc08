"""Tiny networks and made-up pairs of clips and texts for the tests of task video_text."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from fvc_lib.detectors.own.video_text import VideoTextNetwork
from fvc_lib.detectors.packages import mend_torchvision
from fvc_lib.detectors.texts.tokenizer import BEGIN, END, NUM_MARKS
from fvc_lib.engine.random_state import forked_random_state
from fvc_lib.engine.task import Batch, Sample
from fvc_lib.services.config import RunConfig
from fvc_lib.tasks.video_text.training import VideoTextTask

CPU = torch.device("cpu")
WORDS = ("a", "red", "green", "blue", "square", "circle", "on", "over", "the", "left", "right", "moves", "field")
VOCABULARY = 12
CONFIG = RunConfig(
    task="video_text", model="frame_cnn", num_frames=3, fixed_size=16, max_text_tokens=6, embedding_size=8,
    effective_batch_size=8,
)  # fmt: skip


def planned(**changes) -> RunConfig:
    return CONFIG.model_copy(update=changes)


class TinyVideoTexts(VideoTextTask):
    """With narrow transformers."""

    def build_model(self) -> VideoTextNetwork:
        return VideoTextNetwork(self.config, VOCABULARY, width=16, heads=2, layers=1)


def network(config: RunConfig = CONFIG, seed: int = 0) -> VideoTextNetwork:
    with forked_random_state(seed, CPU):
        return tiny_task(config).build_model()


@dataclass(frozen=True)
class MadeUpPairs:
    """Pairs whose clip and text follow from numbers: equal video numbers give equal clips, so do texts."""

    videos: tuple[int, ...]
    texts: tuple[int, ...]
    config: RunConfig = CONFIG

    def __len__(self):
        return len(self.videos)

    def __getitem__(self, index):
        batch = self.__getitems__([index])
        return Sample(batch.sample_ids[0], {name: tensor[0] for name, tensor in batch.tensors.items()})

    def __getitems__(self, indices):
        videos, texts = [self.videos[i] for i in indices], [self.texts[i] for i in indices]
        tensors = {
            "frames": torch.stack([_clip(video, self.config.num_frames, self.config.fixed_size) for video in videos]),
            "tokens": torch.stack([_tokens(text, self.config.max_text_tokens) for text in texts]),
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
def _tokens(text, max_tokens):
    """Of 0 to ``max_tokens - 2`` tokens between beginning and end."""
    generator = torch.Generator().manual_seed(1000 + text)
    length = text % (max_tokens - 1)
    tokens = torch.zeros(max_tokens, dtype=torch.int64)
    tokens[0] = BEGIN
    tokens[1 : 1 + length] = torch.randint(NUM_MARKS, VOCABULARY, (length,), generator=generator)
    tokens[1 + length] = END
    return tokens


def pairs(number: int = 6, config: RunConfig = CONFIG) -> MadeUpPairs:
    """``number`` pairs, the last of which has the first one's text."""
    return MadeUpPairs(tuple(range(number)), (*range(number - 1), 0), config)


def tiny_task(config: RunConfig = CONFIG) -> TinyVideoTexts:
    data = pairs(config=config)
    return TinyVideoTexts(data, data, config, VOCABULARY)


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
