"""A trained detector, of a finished run or of a bundle of one, and what it finds of files.

A file that the run has, to the byte, has the stored score of the one network that had not seen it. A near-duplicate of
a video of the run is said to be one and gets no score, because some of the networks may have been trained on what it
shows. Every other file is judged by all folds'
networks, with the run's own eyes (``scoring.py``).
"""

import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fvc_lib.corpus.probing import ProbeResult
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.services.atomic_files import path_to_text, sha256_of_json
from fvc_lib.services.errors import UsageError, command_text
from fvc_lib.services.progress import Tell, silent
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import AUGMENTED, read_table
from fvc_lib.tasks.bundle_folder import NOT_STATED, RECORD, Standing, is_bundle
from fvc_lib.tasks.decoding import FileToScore, looked_at, scratch_folder
from fvc_lib.tasks.journal import BLOCK_FILES
from fvc_lib.tasks.video.verdicts.bundle import BundleNetworks
from fvc_lib.tasks.video.verdicts.feature_distance import FeatureDistance, distance_of
from fvc_lib.tasks.video.verdicts.rule import KnownVideos
from fvc_lib.tasks.video.verdicts.scoring import FINAL, Networks, RunNetworks, score_clips
from fvc_lib.tasks.video.verdicts.unfamiliar import (
    Familiar,
    KnownFootage,
    index_of_files,
    is_black,
    is_frozen,
    too_few,
)
from fvc_lib.video.clips.clip_file import Pixels
from fvc_lib.video.reencode import recipe_named

_logger = logging.getLogger(__name__)

_LOOKED_FOR = 4  # changes with what findings hold, so that none of another kind is taken from a journal
Seen = Callable[[Path, Pixels], None]


def nobody(_path: Path, _clips: Pixels) -> None:
    """Do nothing: the default callback."""


@dataclass(frozen=True)
class Finding:
    """What became of one file.

    Attributes:
        path: table text, absolute.
        sha256: of its content; empty where it could not be read.
        is_known: whether the run has this very file.
        no_prediction: why there is no score of a file that could be read; sentences.
        logits: calibrated log odds of fake by the network of each fold, or by the one that had not seen it.
        unfamiliar: why an answer is not given whatever the score: in what it is unlike the run's videos, or that there
            is nothing to judge; sentences.
        failure: why it could not be read.
        lasts: whether the same file would be found the same again; not so where a worker died or took too long.
    """

    path: str
    sha256: str = ""
    is_known: bool = False
    no_prediction: tuple[str, ...] = ()
    logits: tuple[float, ...] = ()
    unfamiliar: tuple[str, ...] = ()
    failure: str = ""
    lasts: bool = True


@dataclass(frozen=True)
class Prediction:
    """What a detector says of one file.

    Attributes:
        path: as it was given.
        score: calibrated probability of fake at the base rate of the run's videos, the mean over ``folds``; None: see
            ``failure``.
        low, high: the lowest and highest of the folds' scores.
        folds: whose networks judged; (-1,): the network of all groups.
        is_of_the_run: whether the run has this very file; then its score is that of the network that had not seen it.
        failure: why there is no score; empty where there is one.
    """

    path: Path
    score: float | None = None
    low: float | None = None
    high: float | None = None
    folds: tuple[int, ...] = ()
    is_of_the_run: bool = False
    failure: str = ""


class TrainedDetector:
    """The detector of a run or a bundle.

    Attributes:
        networks: of its folds.
        known: the run's videos, with their out-of-fold scores.
        familiar: what they are like.
        standing: where it stands beside its controls.
        cautions: sentences on decoding that is not known to be the run's, and on what the networks may have seen.
    """

    judges_alone = True  # whether ``networks`` are all that give the score

    def __init__(
        self,
        networks: Networks,
        known: KnownVideos,
        familiar: Familiar,
        standing: Standing = NOT_STATED,
        cautions: Sequence[str] = (),
        distance: Callable[[Tell], FeatureDistance | None] = lambda _tell: None,
    ) -> None:
        self.networks, self.known, self.familiar, self.standing = networks, known, familiar, standing
        self.cautions = tuple(cautions)
        self._distance = distance
        if not self.is_above_control and standing != NOT_STATED:
            _logger.warning("%s: %s", self.model_id, " ".join(standing.sentences))

    @cached_property
    def model_id(self) -> str:
        """The run, and a digest of its networks' weights."""
        folds = self.networks.folds
        digest = sha256_of_json({str(fold): folds[fold].weights for fold in self.networks.judges})
        return f"{self.networks.name}@{digest[:12]}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences on networks whose code has changed, as far as they were asked by now."""
        return tuple(self.networks.remarks)

    @property
    def is_above_control(self) -> bool:
        """Whether the model is shown to be above its controls."""
        return self.standing.standing == "above control"

    @cached_property
    def distance(self) -> FeatureDistance | None:
        """Of a run it is computed when it is first asked for; ``prepare`` tells meanwhile how far that is."""
        return self._distance(silent)

    def prepare(self, tell: Tell) -> None:
        """Compute ``distance``, which ``tell`` follows."""
        if "distance" not in self.__dict__:
            self.distance = self._distance(tell)

    @cached_property
    def identity(self) -> str:
        """Of all that decides what is found of a file."""
        networks, known = self.networks, self.known
        calibrated = [[networks.folds[each].prior_logit, networks.folds[each].temperature] for each in networks.judges]
        looks = sorted(map(str, known.rows.select("video_id", "label", "content_sha256", "perceptual_hash").rows()))
        more: list[Any] = [calibrated, networks.store.decode_hash, networks.config.near_duplicate_bits, looks]
        more += [self.familiar.described, _LOOKED_FOR, self.distance.digest if self.distance else ""]
        return f"{self.model_id}:{sha256_of_json(more)[:16]}"

    @cached_property
    def place_of(self) -> dict[str, int]:
        """Rows of ``known`` by content; of one that several corpora have, that with the score."""
        contents, scores = self.known.rows["content_sha256"], self.known.rows["score"]
        places = sorted(range(len(contents)), key=lambda place: scores[place] is not None)
        return {contents[place]: place for place in places}

    def findings(
        self, files: Sequence[Path], *, workers: int = 0, seen: Seen = nobody, file_seconds: float = 0.0
    ) -> Generator[Finding]:
        """Yield the finding of each of ``files``, in any order; a bad file costs itself alone.

        Args:
            files: absolute, each once.
            workers: processes that decode; 0: one per core.
            seen: is given a scored file and its frames, uint8 (N, T, 3, S, S), as the networks saw them.
            file_seconds: after so long a file is given up; 0: after a minute and a second for each megabyte.

        Raises:
            FvcError: as ``score_files``.
        """
        networks = self.networks
        with scratch_folder(networks.config) as folder:
            clips = [folder / f"{number}.npy" for number in range(len(files))]
            waiting: dict[int, ProbeResult] = {}
            looked = looked_at(networks.store, files, clips, workers=workers, file_seconds=file_seconds)
            with closing(looked) as answers:
                for place, probed, failure in answers:
                    if (said := self._unscored(probed, failure)) is not None:
                        clips[place].unlink(missing_ok=True)
                        yield said
                        continue
                    waiting[place] = probed
                    if len(waiting) * networks.config.clips_per_video >= networks.batch_size:
                        yield from self._scored(files, clips, waiting, seen)
                        waiting = {}
            yield from self._scored(files, clips, waiting, seen)

    def _unscored(self, probed: ProbeResult, failure: str) -> Finding | None:
        """Return the finding of a file that no network judges, else None; ``failure``: why it has no clip."""
        path, content = probed.path, probed.content_sha256
        if probed.probe is None:
            return Finding(path, failure=f"{probed.reason}: {probed.detail}", lasts=probed.lasts)
        if content in self.place_of:
            return self._known(path, content)
        if copied := self._footage.copied(probed.perceptual_hash):
            return Finding(path, content, no_prediction=self._copied(copied))
        return Finding(path, content, failure=failure) if failure else None

    def _scored(
        self, files: Sequence[Path], clips: Sequence[Path], waiting: Mapping[int, ProbeResult], seen: Seen
    ) -> Iterator[Finding]:
        """Yield the findings of the ``waiting`` files, by their places."""
        folds, empty = self.networks.judges, dict[int, tuple[str, ...]]()
        todo = {place: FileToScore(files[place], folds) for place in waiting}

        def look(place: int, frames: Pixels) -> None:
            probe = waiting[place].probe
            assert probe is not None
            num_frames = probe.num_frames
            if recipe := self.networks.store.recipe:
                num_frames = recipe_named(recipe).num_shown(num_frames, probe.duration_seconds)
            empty[place] = tuple(self._nothing_to_judge(frames, num_frames))
            seen(files[place], frames)

        distance = self.distance
        answers = score_clips(self.networks, todo, clips, list(waiting), look, features=distance is not None)
        for answer in answers:
            each = waiting[answer.position]
            assert each.probe is not None
            if answer.failure:
                yield Finding(each.path, each.content_sha256, failure=answer.failure, lasts=answer.lasts)
                continue
            logits = (answer.logits[fold] / self.networks.folds[fold].temperature for fold in folds)
            unfamiliar = (*empty.pop(answer.position), *self.familiar.reasons(asdict(each.probe)))
            if distance is not None and distance.is_unlike(quantile := distance.quantile(answer.features)):
                unfamiliar += (distance.sentence(quantile),)
            yield Finding(each.path, each.content_sha256, logits=tuple(logits), unfamiliar=unfamiliar)

    @cached_property
    def _footage(self) -> KnownFootage:
        return KnownFootage(self.known.rows["perceptual_hash"].to_list(), self.networks.config.near_duplicate_bits)

    def _nothing_to_judge(self, clips: Pixels, num_frames: int) -> Iterator[str]:
        """Sentences on the frames that the networks see, uint8 (N, T, 3, S, S), of a video of ``num_frames``."""
        if num_frames < clips.shape[1]:
            yield too_few(num_frames, clips.shape[1])
        if is_black(clips):
            yield "All frames that the networks see are black: there is nothing to judge."
        elif clips.shape[1] > 1 and is_frozen(clips) and self.networks.sees_order:
            yield "A still: nothing moves in the frames that the networks see, and they look at motion."

    def _known(self, path: str, content: str) -> Finding:
        video = self.known.rows.row(self.place_of[content], named=True)
        if video["score"] is None:
            told = f"{known_sentence(video)}, of which no score is stored: no prediction."
            return Finding(path, content, is_known=True, no_prediction=(told,))
        return Finding(path, content, is_known=True, logits=(video["logit"] / video["temperature"],))

    def _copied(self, places: Sequence[int]) -> tuple[str, ...]:
        videos = self.known.rows[list(places)]
        named = [f"{name}, labelled {label}" for name, label in videos.select("video_id", "label").iter_rows()]
        more = f" and {len(named) - _NAMED:,} more" if len(named) > _NAMED else ""
        told = f"A near-duplicate of a video of the run: {'; '.join(named[:_NAMED])}{more}. No prediction."
        if videos["label"].n_unique() == 1:
            return (told,)
        return (told, "Reals and fakes of the run show this footage, so their labels do not tell which this is.")

    def predict(self, files: Sequence[str | Path] | str | Path, *, workers: int = 0) -> list[Prediction]:
        """One row per file, in their order; a bad file costs itself alone.

        A file of the run, to the byte, has its stored score; a near-duplicate of one has none.

        Args:
            files: videos.
            workers: processes that decode; 0: one per core.

        Raises:
            FvcError: as ``score_files``.
        """
        given = [Path(each) for each in ([files] if isinstance(files, str | Path) else files)]
        absolute = [each.absolute() for each in given]
        todo, found = list(dict.fromkeys(absolute)), dict[str, Finding]()
        for start in range(0, len(todo), BLOCK_FILES):
            for each in self.findings(todo[start : start + BLOCK_FILES], workers=workers):
                found[each.path] = each
        return [self._prediction(*pair) for pair in zip(given, (found[path_to_text(p)] for p in absolute), strict=True)]

    def _prediction(self, path: Path, found: Finding) -> Prediction:
        if not found.logits:
            why = found.failure or " ".join(found.no_prediction)
            return Prediction(path, is_of_the_run=found.is_known, failure=why)
        scores, folds = self.scores(found), self.networks.judges
        if found.is_known:
            folds = (self.known.rows["fold"][self.place_of[found.sha256]],)
        return Prediction(path, mean_of(scores), min(scores), max(scores), folds, found.is_known)

    def scores(self, found: Finding) -> list[float]:
        """Of a file with logits the probability of fake by each network; of one of the run the one that is stored."""
        if found.is_known:
            return [self.known.rows["score"][self.place_of[found.sha256]]]
        scores: list[float] = probabilities(np.array(found.logits), 1.0).tolist()
        return scores


_NAMED = 5


def known_sentence(video: dict[str, object]) -> str:
    """Return the beginning of a sentence on a row of ``KnownVideos.rows``."""
    return f"This is a video of the run, {video['video_id']}, labelled {video['label']}"


def mean_of(scores: Sequence[float]) -> float:
    """Exactly rounded, so that their order does not matter."""
    return math.fsum(scores) / len(scores)


# --- Of a run, or of a bundle


def is_run(path: str | Path) -> bool:
    """Whether a folder is that of a run."""
    folder = Path(path).expanduser()
    return (folder / "params.yaml").is_file() and not is_bundle(folder)


def detector_of(
    folder: Path,
    *,
    allow_code: bool = False,
    held: int | None = None,
    standing: Standing | None = None,
    final: bool = False,
) -> TrainedDetector:
    """``fvc_lib.load_detector``, where ``standing`` is told of a run; a bundle has its own."""
    if is_bundle(folder):
        bundle = BundleNetworks(folder, allow_code=allow_code, held=held)
        if final and FINAL not in bundle.folds:
            raise UsageError(
                f"bundle {str(folder)!r}: has the folds' networks and not the one of all groups. Leave --final out, or "
                "export the run with --final."
            )
        known, cautions = bundle.known_videos(), bundle.cautions()
        familiar, features = Familiar(bundle.ranges()), bundle.features()
        return TrainedDetector(bundle, known, familiar, bundle.record.standing, cautions, lambda _: features)
    if not is_run(folder):
        raise UsageError(
            f"{str(folder)!r} is neither a bundle ({RECORD}) nor a run folder. To make a bundle of a run: "
            f"{command_text('export', 'RUN')}"
        )
    of_run = RunNetworks(RunPaths(folder.absolute()), held=held, final=final)
    rates = [of_run.folds[fold].base_rate for fold in sorted(of_run.outcomes)]
    temperature = of_run.folds[FINAL].temperature if final else 0.0
    known = KnownVideos.of(
        of_run.paths, sorted(of_run.outcomes), rates, of_run.base_rates, final_temperature=temperature
    )
    cautions = decoding_cautions(of_run.paths, of_run)
    return TrainedDetector(
        of_run, known, Familiar.of(index_of_files(of_run.paths)), standing or NOT_STATED, cautions,
        lambda tell: distance_of(of_run, known, tell),
    )  # fmt: skip


def decoding_cautions(run: RunPaths, networks: Networks) -> tuple[str, ...]:
    """Return a caution unless files are decoded by the code and library that decoded the run's videos."""
    if networks.config.of_features == "forensic":  # it has no clips; each fitted model names the code that measured
        return ()
    paths = read_table(run.augmented_metadata, AUGMENTED)["clip_path"] if run.augmented_metadata.is_file() else ()
    if {networks.store.decode_folder.name in Path(path).parts for path in paths} == {True}:
        return ()
    check = command_text("robustness", run.root, "--levels", "lossless")
    told = "The code or library that decodes is not known to be that which decoded the run's videos, so scores may not"
    return (f"{told} compare with theirs. Whether they still come out as stored: {check}",)
