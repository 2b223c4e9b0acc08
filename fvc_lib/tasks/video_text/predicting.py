"""Write captions and find the nearest texts for new videos with a trained network.

Videos are decoded and described like the videos of the training's test part.
"""

from collections.abc import Generator, Sequence
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
from fvc_lib.tasks.bundle import Bundle
from fvc_lib.tasks.decoding import FileToScore, decoded_files, scratch_folder
from fvc_lib.tasks.predicting import Finding, OneNetwork, Picture, Trained, no_picture
from fvc_lib.tasks.video_text.training import network_plan, text_tensors, tokenizer_file
from fvc_lib.video.clips.store import ClipStore, Pixels, load_clip_file
from fvc_lib.video.decode.file_parts import sha256_of_video
from fvc_lib.video.decode.source import VideoError

NEAREST = 5
_TEXTS_AT_ONCE = 256
_TOKENIZER, _TEXTS, _EMBEDDINGS = "tokenizer.json", "texts.parquet", "text_embeddings.safetensors"
_FILLER = "a video"  # the text given with every video; no embedding or caption of a video depends on it


class VideoTextPredictor(OneNetwork):
    """Predictor of task video_text; see ``Predictor``.

    Args:
        trained: the trained network.
        tokenizer: tokenizer of captions and texts.
        texts: the run's M texts (KNOWN_TEXTS); empty where the network does not compare videos with texts.
        embedded: embeddings of ``texts``, unit vectors float32 (M, E); None: computed here if the network compares
            videos with texts.
    """

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
        self.embedded = self._text_embeddings() if plan.contrastive and embedded is None else embedded
        self._nearest = min(NEAREST, texts.height) if plan.contrastive else 0
        self.columns = {"caption": pl.String()} if plan.captions else {}
        for place in range(1, self._nearest + 1):
            self.columns |= {
                f"text_{place}": pl.String(), f"similarity_{place}": pl.Float64(), f"text_{place}_part": pl.String(),
            }  # fmt: skip
        self.notes = ["Files of the run are known again by their content alone: an altered copy of one is not."]
        if plan.captions:
            self.notes.append("A caption is made of the words of the training texts, and is written for every video.")
        if plan.contrastive:
            self.notes.append(
                f"Nearest texts are those of the run's own {texts.height:,}, whatever the video shows; similarity "
                "is the cosine of both embeddings, no probability. Behind a text stands the part of the run it is of."
            )

    @classmethod
    def read(cls, trained: Trained, source: RunPaths | Bundle) -> Self:
        """See ``Predictor``."""
        if isinstance(source, RunPaths):
            parts = pl.col("part").cast(pl.Enum(PARTS)).unique().sort().cast(pl.String).str.join(" ")
            # Each text once, with the parts that have it.
            texts = read_table(source.video_texts, VIDEO_TEXTS).group_by("text_id").agg(pl.col("text").first(), parts)
            return cls(
                trained, TextTokenizer.load(tokenizer_file(source)), texts.sort("text_id").select("text", "part")
            )
        tokenizer = TextTokenizer.load(source.folder / _TOKENIZER)
        if not trained.config.contrastive_weight:
            return cls(trained, tokenizer, frame_of(None, KNOWN_TEXTS))
        texts = source.table(_TEXTS, KNOWN_TEXTS)
        shape = (texts.height, trained.config.embedding_size)

        def embeddings(arrays: dict[str, Any]) -> Tensor:
            rows = arrays["text_embeddings"]
            if not texts.height or rows.dtype != np.float32 or rows.shape != shape or not np.isfinite(rows).all():
                raise ValueError(f"got {rows.dtype} {rows.shape}, wanted finite float32 {shape}")
            return torch.from_numpy(rows)

        return cls(trained, tokenizer, texts, source.arrays(_EMBEDDINGS, embeddings))

    @staticmethod
    def files_of_run(paths: RunPaths) -> pl.DataFrame:
        """See ``Predictor``."""
        return read_table(paths.video_texts, VIDEO_TEXTS)

    def write(self, folder: Path) -> dict[str, Any]:
        """See ``Predictor``."""
        self._tokenizer.save(folder / _TOKENIZER)
        if self.embedded is not None:
            write_table(self.texts, KNOWN_TEXTS, folder / _TEXTS)
            safetensors.torch.save_file({"text_embeddings": self.embedded.contiguous()}, folder / _EMBEDDINGS)
        return super().write(folder)

    @property
    def decode_hash(self) -> str:
        """Return the clip store's digest of the code and library that decode."""
        return ClipStore.of(self.config).decode_hash

    def identity_of_parts(self) -> Any:
        """See ``Predictor``."""
        return [self._tokenizer.fingerprint, self.texts.rows()]

    def findings(self, files: Sequence[Path], *, workers: int = 0, picture: Picture = no_picture) -> Generator[Finding]:
        """See ``Predictor``."""
        store, todo = ClipStore.of(self.config), list[FileToScore]()
        for file in files:
            try:
                todo.append(FileToScore(file, (), content_sha256=sha256_of_video(file)))
            except (OSError, VideoError, ValueError) as error:
                yield Finding(path_to_text(file), failure=str(error), lasts=False)
        with scratch_folder(self.config) as folder:
            clips = [folder / f"{place}.npy" for place in range(len(todo))]
            with closing(decoded_files(store, todo, clips, workers=workers)) as answers:
                for answer in answers:
                    clip, content = clips[answer.position], todo[answer.position].content_sha256
                    path = path_to_text(todo[answer.position].path)
                    if answer.failure:
                        yield Finding(path, content, failure=answer.failure, lasts=answer.lasts)
                        continue
                    frames: Pixels = np.empty(store.shape, np.uint8)
                    load_clip_file(clip, frames, store.shape)
                    clip.unlink()
                    yield self._described(path, content, frames, picture)

    def _described(self, path: str, content: str, frames: Pixels, picture: Picture) -> Finding:
        """Return the finding on one video.

        Args:
            path: absolute path, as text for the tables.
            content: SHA-256 of the file.
            frames: uint8 (T, 3, S, S), the clip.
            picture: called with ``path`` and ``frames``.

        Raises:
            DataError: a similarity is not finite.
        """
        tensors = {"frames": torch.from_numpy(frames)[None], **self._filler}
        if self._plan.masked:
            tensors["hidden"] = torch.zeros(1, len(frames), dtype=torch.bool)
        with torch.inference_mode(), deterministic_algorithms(self.compute.device), Precision(self.compute).autocast():
            outputs = self.network({n: rows.to(self.compute.device) for n, rows in tensors.items()}, write=True)
        values, lines = dict[str, str | float | None](), list[str]()
        if "caption_tokens" in outputs:
            values["caption"] = caption = self._tokenizer.decode(outputs["caption_tokens"][0].cpu()).strip()
            lines.append(caption or "(an empty caption)")
        if self.embedded is not None:
            similarities = (self.embedded @ outputs["video_embedding"][0].float().cpu()).double().numpy()
            if not np.isfinite(similarities).all():
                raise DataError(f"{self.name}: the network says nothing finite of a video.")
            order = np.argsort(-similarities, kind="stable")[: self._nearest].tolist()
            for place, (text, part) in enumerate(self.texts[order].select("text", "part").iter_rows(), start=1):
                similarity = float(similarities[order[place - 1]])
                values |= {f"text_{place}": text, f"similarity_{place}": similarity, f"text_{place}_part": part}
                lines.append(f"{similarity:.2f} {text} ({part})")
        if "caption" not in values:
            lines.insert(0, str(values["text_1"]))
        return Finding(path, content, values, lines[0], tuple(lines[1:]), picture(path, frames))

    def _text_embeddings(self) -> Tensor:
        """Return the embeddings of all texts, unit vectors float32 (M, E)."""
        joint, parts, device = self.network.joint, [], self.compute.device
        assert joint is not None
        for some in self.texts.iter_slices(_TEXTS_AT_ONCE):
            tensors = text_tensors(self.config, self._tokenizer, some["text"].to_list())
            no_video = torch.zeros(some.height, 1, self._plan.width, device=device)
            with torch.inference_mode(), deterministic_algorithms(device):
                with Precision(self.compute).autocast():
                    outputs = joint(no_video, {name: rows.to(device) for name, rows in tensors.items()})
                parts.append(outputs["text_embedding"].float().cpu())
        return torch.cat(parts)
