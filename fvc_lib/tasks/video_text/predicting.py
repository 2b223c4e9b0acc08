"""Write captions and find the nearest texts for new videos with a trained network.

Videos are decoded like the videos of the training's test part.
"""

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Self

import polars as pl
import torch
from torch import Tensor

from fvc_lib.corpus.probing import ProbeResult
from fvc_lib.detectors.own.video_text import JointSpace, VideoTextNetwork
from fvc_lib.detectors.texts.tokenizer import TextTokenizer
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import KNOWN_TEXTS, VIDEO_TEXTS, read_table, write_table
from fvc_lib.tasks.decoding import DecodedFile, looked_at
from fvc_lib.tasks.predicting import Finding, OneNetwork, Trained
from fvc_lib.tasks.video_text.training import TOKENIZER, text_tensors
from fvc_lib.video.clips.store import ClipStore, Pixels

NEAREST = 5  # number of nearest texts in an answer
_TEXTS_AT_ONCE = 256
_TEXTS = "texts.parquet"


class VideoTextPredictor(OneNetwork):
    """The predictor of task video_text: for a new video it writes a caption and finds the nearest texts.

    Args:
        trained: the trained network.
        tokenizer: tokenizer of captions and texts.
        texts: the run's M texts (KNOWN_TEXTS). A network with a contrastive loss compares videos with them.
    """

    files_of_run = VIDEO_TEXTS

    def __init__(self, trained: Trained, tokenizer: TextTokenizer, texts: pl.DataFrame) -> None:
        super().__init__(trained)
        self._tokenizer, self._texts = tokenizer, texts["text"].to_list()
        self.parts = [tokenizer.fingerprint, self._texts]
        network: Any = self._build(lambda: VideoTextNetwork(self.config, tokenizer.vocabulary_size))
        self._network, self.columns = network, dict[str, pl.DataType]()
        if network.captions is not None:
            self.columns["caption"] = pl.String()
            self.notes.append("A caption is made of the words of the training texts, and is written for every video.")
        if network.joint is not None:
            self._embedded = self._text_embeddings(network.joint)
            for place in range(1, min(NEAREST, len(self._texts)) + 1):
                self.columns |= {f"text_{place}": pl.String(), f"similarity_{place}": pl.Float64()}
            self.notes.append(
                f"Nearest texts are those of the run's own {len(self._texts):,}, whatever the video shows; similarity "
                "is the cosine of both embeddings, no probability."
            )

    @classmethod
    def read(cls, trained: Trained, folder: Path, files: pl.DataFrame | None) -> Self:
        """Read the tokenizer and the texts of a trained network, and return its predictor.

        The tokenizer is in ``folder``. The texts come from the run's table ``files``; if it is None, they are read from
        a table in ``folder``.
        """
        if files is None:
            texts = read_table(folder / _TEXTS, KNOWN_TEXTS)
        else:
            texts = files.select("text").unique().sort("text")
        return cls(trained, TextTokenizer.load(folder / TOKENIZER), texts)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write tokenizer, texts and the table of the run's files to ``folder``, and return an empty dict.

        The dict is the task's section of ``bundle.json``.
        """
        self._tokenizer.save(folder / TOKENIZER)
        write_table(pl.DataFrame({"text": self._texts}), KNOWN_TEXTS, folder / _TEXTS)
        return super().write(folder)

    @property
    def decode_hash(self) -> str:
        """The hex SHA-256 of the code and the library that decode videos, as the clip store computes it.

        If it differs from the hash at the training, predictions may differ a little from the run's.
        """
        return ClipStore.of(self.config).decode_hash

    def _decoded(
        self, files: Sequence[Path], targets: Sequence[Path], workers: int
    ) -> Generator[tuple[ProbeResult, DecodedFile]]:
        return looked_at(ClipStore.of(self.config), files, targets, (), workers=workers)

    def _answer(self, probed: ProbeResult, decoded: Pixels) -> Finding:
        network, values, lines = self._network, dict[str, str | float | None](), list[str]()
        with self._computing():
            memory = network.video(torch.from_numpy(decoded)[None].to(self.compute.device))
            if network.captions is not None:
                caption = self._tokenizer.decode(network.captions.write(memory)[0].cpu()).strip()
                values["caption"] = caption
                lines.append(caption or "(an empty caption)")
            if network.joint is not None:
                found = (self._embedded @ network.joint.of_videos(memory)[0].float().cpu()).double()
                if not found.isfinite().all():
                    raise DataError(f"{self.name}: the similarity of {probed.path} to a text is not finite.")
                for place, row in enumerate(found.argsort(descending=True, stable=True)[:NEAREST].tolist(), start=1):
                    values |= {f"text_{place}": self._texts[row], f"similarity_{place}": float(found[row])}
                    lines.append(f"{found[row]:.2f} {self._texts[row]}")
        return Finding(probed.path, probed.content_sha256, values, lines[0], tuple(lines[1:]))

    def _text_embeddings(self, joint: JointSpace) -> Tensor:
        """Return the embeddings of the run's M texts, unit vectors float32 (M, E) on the CPU.

        ``joint`` is the part of the network that embeds texts and videos in the same space.
        """
        tensors = text_tensors(self._tokenizer, self._texts, self.config)
        parts = []
        for first in range(0, len(self._texts), _TEXTS_AT_ONCE):
            some = slice(first, first + _TEXTS_AT_ONCE)
            batch = {name: rows[some].to(self.compute.device) for name, rows in tensors.items()}
            with self._computing():
                parts.append(joint.of_texts(batch))
        return torch.cat(parts).float().cpu()
