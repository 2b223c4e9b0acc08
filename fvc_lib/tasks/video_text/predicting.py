"""Captions and nearest texts of any videos by a finished training of task video_text: decoded as its corpus was, and
described by the same network as its test part.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import numpy as np
import polars as pl
import safetensors.torch
import torch
from torch import Tensor

from fvc_lib.detectors.own.video_text import VideoTextNetwork
from fvc_lib.detectors.texts.tokenizer import TextTokenizer
from fvc_lib.engine.device import Precision, deterministic_algorithms
from fvc_lib.services.atomic_files import path_to_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import KNOWN_TEXTS, PARTS, VIDEO_TEXTS, frame_of, read_table, write_table
from fvc_lib.tasks.bundle import read_arrays, read_bundle_table, refused
from fvc_lib.tasks.decoding import FileToScore, decoded_files, scratch_folder
from fvc_lib.tasks.predicting import Finding, OneNetwork, Picture, Trained, no_picture
from fvc_lib.tasks.video_text.training import network_plan, text_tensors, tokenizer_file
from fvc_lib.video.clips.clip_file import Pixels, load_clip_file
from fvc_lib.video.clips.store import ClipStore
from fvc_lib.video.decode.file_parts import sha256_of_video
from fvc_lib.video.decode.source import VideoError

NEAREST = 5
_TEXTS_AT_ONCE = 256
_TOKENIZER, _TEXTS, _EMBEDDINGS = "tokenizer.json", "texts.parquet", "text_embeddings.safetensors"
_FILLER = "a video"  # stands beside every video; no embedding or caption of a video depends on it
_UNIT = 1e-3  # so far from 1 may an embedding's length be


class VideoTextPredictor(OneNetwork):
    """See ``Predictor``; ``texts`` are KNOWN_TEXTS, and ``embedded`` their embeddings, unit vectors (M, E), where the
    network compares videos with texts. None: they are computed.
    """

    kind = "video"

    def __init__(
        self, trained: Trained, tokenizer: TextTokenizer, texts: pl.DataFrame, embedded: Tensor | None = None
    ) -> None:
        super().__init__(trained)
        self._tokenizer, self.texts = tokenizer, texts
        self._plan = plan = network_plan(self.config, tokenizer.vocabulary_size)
        network = self._build(lambda: VideoTextNetwork(plan))
        assert isinstance(network, VideoTextNetwork)
        self.network = network
        self._filler = text_tensors(self.config, tokenizer, [_FILLER])
        if plan.contrastive and embedded is None:
            embedded = self._text_embeddings()
        self.embedded = embedded
        self._nearest = min(NEAREST, texts.height) if plan.contrastive else 0
        columns: dict[str, pl.DataType] = {"caption": pl.String()} if plan.captions else {}
        for place in range(1, self._nearest + 1):
            columns |= {
                f"text_{place}": pl.String(), f"similarity_{place}": pl.Float64(), f"text_{place}_part": pl.String(),
            }  # fmt: skip
        self.columns, self.notes = columns, self._notes()

    @classmethod
    def from_run(cls, trained: Trained, paths: RunPaths) -> Self:
        """See ``Predictor``."""
        pairs = read_table(paths.video_texts, VIDEO_TEXTS)
        # Each text once, with the parts that it stands in, those it was trained with first.
        texts = (
            pairs.group_by("text_id")
            .agg(pl.col("text").first(), pl.col("part").unique())
            .sort("text_id")
            .with_columns(
                part=pl.col("part").map_elements(lambda own: " ".join(p for p in PARTS if p in own), pl.String)
            )
        )
        return cls(trained, TextTokenizer.load(tokenizer_file(paths)), texts.select("text", "part"))

    @classmethod
    def from_bundle(cls, trained: Trained, folder: Path) -> Self:
        """See ``Predictor``."""
        tokenizer, is_compared = TextTokenizer.load(folder / _TOKENIZER), bool(trained.config.contrastive_weight)
        for name in (_TEXTS, _EMBEDDINGS):
            if (folder / name).is_file() != is_compared:
                raise refused(folder, f"{name!r} is {'missing' if is_compared else 'not of this network'}")
        if not is_compared:
            return cls(trained, tokenizer, frame_of(None, KNOWN_TEXTS))
        texts = read_bundle_table(folder, _TEXTS, KNOWN_TEXTS)
        shape = (texts.height, trained.config.embedding_size)

        def read(arrays: dict[str, Any]) -> Tensor:
            rows = arrays["text_embeddings"]
            is_alone = set(arrays) == {"text_embeddings"} and texts.height > 0
            if not is_alone or rows.dtype != np.float32 or rows.shape != shape:
                raise ValueError(f"got {rows.dtype} {rows.shape}, wanted float32 {shape} alone")
            if not (np.abs(np.linalg.norm(rows, axis=1) - 1) < _UNIT).all():
                raise ValueError("wanted unit vectors")
            return torch.from_numpy(rows)

        return cls(trained, tokenizer, texts, read_arrays(folder, _EMBEDDINGS, read))

    @staticmethod
    def files_of_run(paths: RunPaths) -> pl.DataFrame:
        """See ``Predictor``."""
        return read_table(paths.video_texts, VIDEO_TEXTS).select("content_sha256", "part")

    def write(self, folder: Path) -> dict[str, Any]:
        """See ``Predictor``."""
        self._tokenizer.save(folder / _TOKENIZER)
        if self.embedded is not None:
            write_table(self.texts, KNOWN_TEXTS, folder / _TEXTS)
            safetensors.torch.save_file({"text_embeddings": self.embedded.contiguous()}, folder / _EMBEDDINGS)
        return super().write(folder)

    @property
    def decode_hash(self) -> str:
        """That of the clip store."""
        return ClipStore.of(self.config).decode_hash

    def identity_of_parts(self) -> Any:
        """See ``Predictor``."""
        return [self._tokenizer.fingerprint, self.texts.rows()]

    def findings(self, files: Sequence[Path], *, workers: int = 0, picture: Picture = no_picture) -> Generator[Finding]:
        """See ``Predictor``."""
        store, contents = ClipStore.of(self.config), dict[int, str]()
        for position, file in enumerate(files):
            try:
                contents[position] = sha256_of_video(file)
            except (OSError, VideoError, ValueError) as error:
                yield Finding(path_to_text(file), failure=str(error), lasts=False)
        places = sorted(contents)
        todo = [FileToScore(files[place], (), content_sha256=contents[place]) for place in places]
        with scratch_folder(self.config) as folder:
            clips = [folder / f"{place}.npy" for place in places]
            with closing(decoded_files(store, todo, clips, workers=workers)) as answers:
                for answer in answers:
                    place = places[answer.position]
                    path, content = path_to_text(files[place]), contents[place]
                    if answer.failure:
                        yield Finding(path, content, failure=answer.failure, lasts=answer.lasts)
                        continue
                    frames: Pixels = np.empty(store.shape, np.uint8)
                    load_clip_file(clips[answer.position], frames, store.shape)
                    clips[answer.position].unlink()
                    yield self._described(path, content, frames, picture)

    def _described(self, path: str, content: str, frames: Pixels, picture: Picture) -> Finding:
        outputs, values = self._forward(torch.from_numpy(frames)), dict[str, str | float | None]()
        if "caption_tokens" in outputs:
            values["caption"] = self._tokenizer.decode(outputs["caption_tokens"][0]).strip()
        if self.embedded is not None:
            similarities = (self.embedded @ outputs["video_embedding"][0]).double().numpy()
            if not np.isfinite(similarities).all():
                raise DataError(f"{self.name}: the network says nothing finite of a video.")
            order = np.argsort(-similarities, kind="stable")[: self._nearest].tolist()
            for place, number in enumerate(order, start=1):
                values[f"text_{place}"] = self.texts["text"][number]
                values[f"similarity_{place}"] = float(similarities[number])
                values[f"text_{place}_part"] = self.texts["part"][number]
        title, lines = _told(values, self._nearest)
        return Finding(path, content, values, title, lines, picture(path, frames))

    def _forward(self, frames: Tensor) -> Mapping[str, Tensor]:
        """Return the network's outputs for the clip ``frames``, uint8 (T, 3, S, S), on the CPU."""
        beside = dict(self._filler)
        if self._plan.masked:
            beside["hidden"] = torch.zeros(1, len(frames), dtype=torch.bool)
        device = self.compute.device
        tensors = {name: rows.to(device) for name, rows in ({"frames": frames[None]} | beside).items()}
        with torch.inference_mode(), deterministic_algorithms(device), Precision(self.compute).autocast():
            outputs = self.network(tensors, write=True)
        return {name: each.float().cpu() if each.is_floating_point() else each.cpu() for name, each in outputs.items()}

    def _text_embeddings(self) -> Tensor:
        """Float32 (M, E) of all texts, unit vectors."""
        joint, parts = self.network.joint, []
        assert joint is not None
        for start in range(0, self.texts.height, _TEXTS_AT_ONCE):
            some = self.texts["text"][start : start + _TEXTS_AT_ONCE].to_list()
            tensors = text_tensors(self.config, self._tokenizer, some)
            tensors = {name: rows.to(self.compute.device) for name, rows in tensors.items()}
            no_video = torch.zeros(len(some), 1, self._plan.width, device=self.compute.device)
            with torch.inference_mode(), deterministic_algorithms(self.compute.device):
                with Precision(self.compute).autocast():
                    outputs = joint(no_video, tensors)
                parts.append(outputs["text_embedding"].float().cpu())
        return torch.cat(parts)

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if self._plan.contrastive:
            notes.append(
                f"Nearest texts are those of the run's own {self.texts.height:,}, whatever the video shows; similarity "
                "is the cosine of both embeddings, no probability. Behind a text stands the part of the run it is of."
            )
        if self._plan.captions:
            notes.append("A caption is put together of what the training texts say, and is written of every video.")
        notes.append("Files of the run are known again by their content alone: an altered copy of one is not.")
        return tuple(notes)


def _told(values: Mapping[str, str | float | None], nearest: int) -> tuple[str, tuple[str, ...]]:
    lines = [
        f"{values[f'similarity_{n}']:.2f} {values[f'text_{n}']} ({values[f'text_{n}_part']})"
        for n in range(1, nearest + 1)
    ]
    if "caption" in values:
        return str(values["caption"]) or "(an empty caption)", tuple(lines)
    return str(values["text_1"]), tuple(lines)
