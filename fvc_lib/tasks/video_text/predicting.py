"""Write captions and find the nearest texts for new videos with a trained network.

Videos are decoded like the videos of the training's test part.
"""

from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import numpy as np
import polars as pl
import torch
from torch import Tensor

from fvc_lib.detectors.own.video_text import JointSpace, VideoTextNetwork
from fvc_lib.detectors.texts.tokenizer import TextTokenizer
from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import KNOWN_TEXTS, VIDEO_TEXTS, read_table, write_table
from fvc_lib.tasks.decoding import looked_at, scratch_folder
from fvc_lib.tasks.predicting import Finding, OneNetwork, Trained
from fvc_lib.tasks.video_text.task import TOKENIZER, text_tensors
from fvc_lib.video.clips.store import ClipStore, Pixels, load_clip_file

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
        network = self._build(lambda: VideoTextNetwork(self.config, tokenizer.vocabulary_size))
        assert isinstance(network, VideoTextNetwork)
        self._network, self.columns = network, dict[str, pl.DataType]()
        self.notes = ["Files of the run are known again by their content alone: an altered copy of one is not."]
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
        """Return the predictor of ``trained``, after reading its tokenizer in ``folder``, and its texts.

        The texts come from the run's table ``files``. If that is None, they are read from a table in ``folder``.
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

        Where it differs from the training's, answers may differ too.
        """
        return ClipStore.of(self.config).decode_hash

    def findings(self, files: Sequence[Path], *, workers: int = 0) -> Generator[Finding]:
        """Yield one finding per video, in any order; a bad file gives a finding with a failure.

        Args:
            files: absolute paths without repeats.
            workers: number of processes that decode; 0: one per core.
        """
        store = ClipStore.of(self.config)
        with scratch_folder(self.config) as folder:
            clips = [folder / f"{place}.npy" for place in range(len(files))]
            with closing(looked_at(store, files, clips, (), workers=workers)) as answers:
                for probed, decoded in answers:
                    path, clip = probed.path, clips[decoded.position]
                    if probed.probe is None:
                        yield Finding(path, failure=f"{probed.reason}: {probed.detail}", lasts=probed.lasts)
                    elif decoded.failure:
                        yield Finding(path, probed.content_sha256, failure=decoded.failure)
                    else:
                        frames: Pixels = np.empty(store.shape, np.uint8)
                        load_clip_file(clip, frames, store.shape)
                        yield self._described(path, probed.content_sha256, frames)
                    clip.unlink(missing_ok=True)

    def _described(self, path: str, content: str, frames: Pixels) -> Finding:
        """Return the finding on one video: its caption and its nearest texts.

        Args:
            path: absolute path, as tables store it (``path_to_text``).
            content: SHA-256 of the file.
            frames: uint8 (T, 3, S, S), the clip.

        Raises:
            DataError: a similarity is not finite.
        """
        network, values, lines = self._network, dict[str, str | float | None](), list[str]()
        with self._computing():
            memory = network.video(torch.from_numpy(frames)[None].to(self.compute.device))
            if network.captions is not None:
                caption = self._tokenizer.decode(network.captions.write(memory)[0].cpu()).strip()
                values["caption"] = caption
                lines.append(caption or "(an empty caption)")
            if network.joint is not None:
                found = (self._embedded @ network.joint.of_videos(memory)[0].float().cpu()).double()
                if not found.isfinite().all():
                    raise DataError(f"{self.name}: the similarity of {path} to a text is not finite.")
                for place, row in enumerate(found.argsort(descending=True, stable=True)[:NEAREST].tolist(), start=1):
                    values |= {f"text_{place}": self._texts[row], f"similarity_{place}": float(found[row])}
                    lines.append(f"{found[row]:.2f} {self._texts[row]}")
        return Finding(path, content, values, lines[0], tuple(lines[1:]))

    def _text_embeddings(self, joint: JointSpace) -> Tensor:
        """Return the embeddings of the run's M texts, unit vectors float32 (M, E) on the CPU.

        ``joint`` is the part of the network that embeds texts and videos in the same space.
        """
        tensors = text_tensors(self._tokenizer, self._texts, self.config)
        with self._computing():
            parts = []
            for first in range(0, len(self._texts), _TEXTS_AT_ONCE):
                some = slice(first, first + _TEXTS_AT_ONCE)
                batch = {name: rows[some].to(self.compute.device) for name, rows in tensors.items()}
                parts.append(joint.of_texts(batch))
        return torch.cat(parts).float().cpu()
