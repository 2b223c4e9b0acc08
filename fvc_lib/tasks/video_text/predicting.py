"""Captions and nearest texts of any videos by a finished run of task video_text: decoded as its corpus was, and
described by the same forward pass as its test part.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import polars as pl
import torch
from torch import Tensor

from fvc_lib.detectors.own.video_text import VideoTextNetwork
from fvc_lib.detectors.texts.tokenizer import TextTokenizer
from fvc_lib.engine.device import Precision, deterministic_algorithms, resolve_device
from fvc_lib.services.errors import DataError
from fvc_lib.services.parameters import run_config
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import PARTS, VIDEO_TEXTS, read_table
from fvc_lib.services.tasks import VIDEO_TEXT as STAGE
from fvc_lib.tasks.predicting import Prediction, trained_network
from fvc_lib.tasks.video.verdicts.scoring import FileToScore, decoded_files, scratch_folder
from fvc_lib.tasks.video_text.training import network_plan, text_question, text_tensors, tokenizer_file
from fvc_lib.video.clips.store import ClipStore, Pixels, load_clip_file
from fvc_lib.video.decode.source import VideoError, sha256_of_video

NEAREST = 5
_TEXTS_AT_ONCE = 256


class VideoTextPredictor:
    """See ``tasks.predicting.Predictor``."""

    kind = "video"

    def __init__(self, paths: RunPaths) -> None:
        self._config, self.name = run_config(paths), paths.run_id
        self._compute = resolve_device(self._config.device, self._config.amp)
        pairs = read_table(paths.video_texts, VIDEO_TEXTS)
        self.contents = dict(pairs.select("content_sha256", "part").iter_rows())
        self._tokenizer = TextTokenizer.load(tokenizer_file(paths))
        plan = network_plan(self._config, self._tokenizer.vocabulary_size)
        question = text_question(self._config, self._tokenizer)
        network = trained_network(paths, STAGE, lambda: VideoTextNetwork(plan), question, self._compute)
        assert isinstance(network, VideoTextNetwork)
        self._network, self._plan = network, plan
        # Each text once, with the parts that it stands in, those it was trained with first.
        self.texts = (
            pairs.group_by("text_id")
            .agg(pl.col("text").first(), pl.col("part").unique())
            .sort("text_id")
            .with_columns(
                part=pl.col("part").map_elements(lambda own: " ".join(p for p in PARTS if p in own), pl.String)
            )
        )
        self._filler = text_tensors(self._config, self._tokenizer, [self.texts["text"][0]])
        self._embedded = self._text_embeddings() if plan.contrastive else None
        nearest = min(NEAREST, self.texts.height) if plan.contrastive else 0
        self.columns: dict[str, pl.DataType] = {"caption": pl.String()} if plan.captions else {}
        for place in range(1, nearest + 1):
            self.columns |= {
                f"text_{place}": pl.String(), f"similarity_{place}": pl.Float64(), f"text_{place}_part": pl.String(),
            }  # fmt: skip
        self._nearest = nearest
        self.notes = self._notes()

    def predictions(self, files: Sequence[Path], *, workers: int = 0) -> Generator[Prediction]:
        """See ``Predictor``."""
        store = ClipStore.of(self._config)
        batch_size = self._config.batch_size or DETECTORS.get(self._config.model).micro_batch
        contents, ready = dict[int, str](), list[int]()
        for position, file in enumerate(files):
            try:
                contents[position] = sha256_of_video(file)
            except (OSError, VideoError, ValueError) as error:
                yield Prediction(position, failure=str(error))
        places = sorted(contents)
        todo = [FileToScore(files[place], (), content_sha256=contents[place]) for place in places]
        with scratch_folder(self._config) as folder:
            clips = [folder / f"{place}.npy" for place in places]
            with closing(decoded_files(store, todo, clips, workers=workers)) as answers:
                for answer in answers:
                    place = places[answer.position]
                    if answer.failure:
                        yield Prediction(place, content_sha256=contents[place], failure=answer.failure)
                        continue
                    ready.append(answer.position)
                    if len(ready) == batch_size:
                        yield from self._answers([(places[n], contents[places[n]], clips[n]) for n in ready], store)
                        ready = []
            yield from self._answers([(places[n], contents[places[n]], clips[n]) for n in ready], store)

    def _answers(self, videos: Sequence[tuple[int, str, Path]], store: ClipStore) -> Generator[Prediction]:
        if not videos:
            return
        frames: Pixels = np.empty((len(videos), *store.shape), np.uint8)
        for (_, _, clip), into in zip(videos, frames, strict=True):
            load_clip_file(clip, into, store.shape)
            clip.unlink()
        outputs = self._forward(torch.from_numpy(frames))
        similarities = None
        if self._embedded is not None:
            similarities = (outputs["video_embedding"] @ self._embedded.T).double().numpy()
            if not np.isfinite(similarities).all():
                raise DataError(f"{self.name}: the network says nothing finite of a video.")
        for row, (position, content, _) in enumerate(videos):
            values: dict[str, str | float | None] = {}
            if "caption_tokens" in outputs:
                values["caption"] = self._tokenizer.decode(outputs["caption_tokens"][row]).strip()
            if similarities is not None:
                order = np.argsort(-similarities[row], kind="stable")[: self._nearest].tolist()
                for place, number in enumerate(order, start=1):
                    values[f"text_{place}"] = self.texts["text"][number]
                    values[f"similarity_{place}"] = float(similarities[row, number])
                    values[f"text_{place}_part"] = self.texts["part"][number]
            title, lines = _told(values, self._nearest)
            yield Prediction(position, values, title, lines, frames[row], content)

    def _forward(self, frames: Tensor) -> Mapping[str, Tensor]:
        """What the network gives of the test part's samples, on the CPU; all stand beside one text, which no video's
        embedding or caption depends on.
        """
        beside = {name: rows.expand(len(frames), *rows.shape[1:]) for name, rows in self._filler.items()}
        if self._plan.masked:
            beside["hidden"] = torch.zeros(frames.shape[:2], dtype=torch.bool)
        tensors = {name: rows.to(self._compute.device) for name, rows in ({"frames": frames} | beside).items()}
        device = self._compute.device
        with torch.inference_mode(), deterministic_algorithms(device), Precision(self._compute).autocast():
            outputs = self._network(tensors, self._config.beam_width)
        return {name: each.float().cpu() if each.is_floating_point() else each.cpu() for name, each in outputs.items()}

    def _text_embeddings(self) -> Tensor:
        """Float32 (M, E) of all texts, unit vectors."""
        joint, parts = self._network.joint, []
        assert joint is not None
        for start in range(0, self.texts.height, _TEXTS_AT_ONCE):
            some = self.texts["text"][start : start + _TEXTS_AT_ONCE].to_list()
            tensors = text_tensors(self._config, self._tokenizer, some)
            tensors = {name: rows.to(self._compute.device) for name, rows in tensors.items()}
            no_video = torch.zeros(len(some), 1, self._plan.width, device=self._compute.device)
            with torch.inference_mode(), deterministic_algorithms(self._compute.device):
                with Precision(self._compute).autocast():
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
