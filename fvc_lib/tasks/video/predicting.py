"""The detector of a run, an ensemble or a bundle of task video, and its findings on files.

A file that the run has, to the byte, gets the stored score of the one network that had not seen it. A near-duplicate of
a video of the run gets no score, because some networks may have been trained on its footage. Every other file is judged
by all folds' networks, decoded as the run decoded its videos (``verdicts/scoring.py``). In an ensemble every member
decodes and judges for itself, and their log odds are combined by fold.
"""

import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import polars as pl
import safetensors.numpy
from pydantic import Field

from fvc_lib.corpus.probing import ProbeResult
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.services.atomic_files import path_from_text, sha256_of_json
from fvc_lib.services.errors import DataError, UsageError, command_text
from fvc_lib.services.progress import Tell, silent
from fvc_lib.services.records.ensembles import EnsembleRecord, is_ensemble, members_of, read_ensemble
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import AUGMENTED, INDEX, KNOWN_VIDEOS, read_table, write_table
from fvc_lib.tasks.bundle import MEMBERS, Bundle, refused, write_bundle
from fvc_lib.tasks.decoding import FileToScore, looked_at, scratch_folder
from fvc_lib.tasks.predicting import NOT_STATED, Picture, Prediction, Predictor, Standing, Strict, no_picture
from fvc_lib.tasks.video.verdicts.rule import KnownVideos
from fvc_lib.tasks.video.verdicts.scoring import (
    FINAL,
    FoldNetwork,
    Networks,
    name_of,
    networks_of_run,
    score_clips,
    score_files,
)
from fvc_lib.tasks.video.verdicts.unfamiliar import (
    FeatureDistance,
    KnownFootage,
    TrainingRanges,
    distance_of,
    is_black,
    is_frozen,
    training_ranges,
)
from fvc_lib.video.clips.clip_file import Pixels
from fvc_lib.video.reencode import recipe_named

_logger = logging.getLogger(__name__)

_VERSION = 5  # changes with the content of findings: a journal's of another version are not reused
_NAMED = 5
_KNOWN, _FEATURES = "known_videos.parquet", "features.safetensors"
_Number = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class Finding:
    """The findings on one file.

    Attributes:
        path: table text, absolute.
        sha256: of its content; empty where it could not be read.
        is_known: whether the run has this very file.
        no_prediction: sentences on why a readable file has no score.
        logits: calibrated log odds of fake by the network of each fold, or by the one that had not seen it.
        unfamiliar: sentences on why no answer is given whatever the score: how it is unlike the run's videos, or that
            there is nothing to judge.
        failure: why it could not be read.
        lasts: whether another attempt would find the same; False after a crash or a timeout.
    """

    path: str
    sha256: str = ""
    is_known: bool = False
    no_prediction: tuple[str, ...] = ()
    logits: tuple[float, ...] = ()
    unfamiliar: tuple[str, ...] = ()
    failure: str = ""
    lasts: bool = True


class FoldRecord(Strict):
    """How the logits of one network become scores and decisions."""

    prior_logit: _Number
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    threshold: Annotated[float, Field(ge=0, le=1)]
    base_rate: Annotated[float, Field(gt=0, lt=1)] | None


class Section(Strict):
    """A video detector's section of ``bundle.json``; of an ensemble ``ensemble`` alone, of a run the rest."""

    folds: list[FoldRecord] = Field(default_factory=list)
    final: FoldRecord | None = None  # the network of all groups: then it judges alone, and no fold's is in the bundle
    ranges: TrainingRanges | None = None
    ensemble: EnsembleRecord | None = None


class VideoDetector(Predictor):
    """The detector of a run, an ensemble or a bundle.

    Args:
        networks: of the folds; of an ensemble those of the member with the largest weight.
        known: the run's videos, with their out-of-fold scores.
        ranges: what they are like.
        standing: how the model compares with its controls.
        cautions: sentences on decoding that is not known to be the run's.
        distance: returns the features of the run's videos; None: not known.
        ensemble: how the members are combined.
        members: their detectors, in that record's order.
    """

    columns = dict.fromkeys(("score", "low", "high"), pl.Float64())

    def __init__(
        self,
        networks: Networks,
        known: KnownVideos,
        ranges: TrainingRanges,
        standing: Standing = NOT_STATED,
        cautions: Sequence[str] = (),
        distance: Callable[[Tell], FeatureDistance | None] = lambda _tell: None,
        *,
        ensemble: EnsembleRecord | None = None,
        members: Sequence["VideoDetector"] = (),
    ) -> None:
        trained = {} if ensemble else {_stem(fold): networks.folds[fold].trained for fold in networks.judges}
        super().__init__(ensemble.name if ensemble else networks.name, networks.config, trained, standing)
        self.networks, self.known, self.ranges, self.cautions = networks, known, ranges, tuple(cautions)
        self.ensemble, self.members, self._distance = ensemble, tuple(members), distance
        if not self.is_above_control and standing != NOT_STATED:
            _logger.warning("%s: %s", self.model_id, " ".join(standing.sentences))

    @classmethod
    def of_run(
        cls, paths: RunPaths, standing: Standing = NOT_STATED, *, held: int | None = 1, final: bool = False
    ) -> Self:
        """See ``Predictor``; ``DataError`` where a member of an ensemble is missing or was trained again."""
        if is_ensemble(paths.root):
            if final:
                raise UsageError("--final: an ensemble has no network of all groups. Leave it out.")
            record = read_ensemble(paths.root)
            members = [cls.of_run(run, held=held) for run in members_of(paths.root, record)]
            for member, stated in zip(members, record.members, strict=True):
                if not member.has_weights(stated.weights):
                    raise DataError(
                        f"{member.name} was trained again since it became a member of {record.name}: its weights are "
                        "others. Make the ensemble again."
                    )
            rates = [rule.base_rate for rule in record.folds]
            known = KnownVideos.of(paths, range(len(record.folds)), rates)
            return cls._of_members(record, members, known, standing)
        networks = networks_of_run(paths, held=held, final=final)
        folds = [fold for fold in sorted(networks.folds) if fold != FINAL]
        rates = [networks.folds[fold].base_rate for fold in folds]
        temperature = networks.folds[FINAL].temperature if final else 0.0
        known = KnownVideos.of(paths, folds, rates, networks.base_rates, final_temperature=temperature)
        ranges, cautions = training_ranges(index_of_files(paths)), decoding_cautions(paths, networks)
        return cls(networks, known, ranges, standing, cautions, lambda tell: distance_of(networks, known, tell))

    @classmethod
    def of_bundle(cls, bundle: Bundle, *, held: int | None = 1) -> Self:
        """See ``Predictor``."""
        folder, section = bundle.folder, bundle.section(Section)
        rows, record = bundle.table(_KNOWN, KNOWN_VIDEOS), section.ensemble
        num_folds = len(record.folds if record else section.folds)
        if not set(rows["fold"].drop_nulls()) <= set(range(num_folds)):
            raise refused(folder, f"{_KNOWN} names a fold of which there is no network")
        if rows.drop_nulls("score")["label"].n_unique() < 2:
            raise refused(folder, f"{_KNOWN} has no scores of both reals and fakes")
        rows = rows.with_columns(video_id=pl.col("content_sha256").str.head(16))
        if record is not None:
            members = []
            for number, stated in enumerate(record.members):
                opened = Bundle.open(folder / MEMBERS / str(number), allow_code=bundle.allow_code)
                member = cls.of_bundle(opened, held=held)
                if not member.has_weights(stated.weights) or len(member.networks.folds) != num_folds:
                    raise refused(folder, f"the weights of {stated.run_id} are not those of the ensemble")
                members.append(member)
            known = KnownVideos(rows, [rule.base_rate for rule in record.folds])
            return cls._of_members(record, members, known, bundle.record.standing)
        if section.ranges is None or not section.folds:
            raise refused(folder, "its section has no folds or no ranges")
        by_fold = dict(enumerate(section.folds)) if section.final is None else {FINAL: section.final}
        folds = {
            fold: FoldNetwork(bundle.trained(_stem(fold), fold=name_of(fold)), **each.model_dump())
            for fold, each in by_fold.items()
        }
        networks = Networks(bundle.record.name, bundle.config, folds, held=held)
        known = KnownVideos(rows, [each.base_rate for each in section.folds], networks.base_rates)
        features = bundle.arrays(_FEATURES, lambda arrays: FeatureDistance.of_arrays(arrays, networks.judges))
        return cls(networks, known, section.ranges, bundle.record.standing, (), lambda _: features)

    @classmethod
    def _of_members(
        cls, record: EnsembleRecord, members: Sequence["VideoDetector"], known: KnownVideos, standing: Standing
    ) -> Self:
        lead, cautions = members[record.lead], [told for member in members for told in member.cautions]
        told = f"Evidence beside a score is of {lead.name} alone, the member with the largest weight."
        return cls(
            lead.networks, known, members[0].ranges, standing, (*dict.fromkeys(cautions), told), lead.distance_now,
            ensemble=record, members=members,
        )  # fmt: skip

    def has_weights(self, weights: Sequence[str]) -> bool:
        """Return whether the folds' networks have these digests."""
        return [self.networks.folds[fold].weights for fold in sorted(self.networks.folds)] == list(weights)

    # --- Bundles

    def write(self, folder: Path) -> dict[str, Any]:
        """See ``Predictor``."""
        write_table(self.known.anonymous(), KNOWN_VIDEOS, folder / _KNOWN)
        if self.ensemble is not None:
            stated = []
            for number, member in enumerate(self.members):
                place = folder / MEMBERS / str(number)
                place.parent.mkdir(exist_ok=True)
                write_bundle(member, place, f"# {member.name}\n\nA member of {self.name}: see README.md there.\n")
                stated.append(self.ensemble.members[number].model_copy(update={"path": f"{MEMBERS}/{number}"}))
            firsts = [self.ensemble.detector_of_member.index(place) for place in range(len(self.ensemble.detectors))]
            names = [self.ensemble.members[first].model for first in firsts]  # without places of this machine
            record = self.ensemble.model_copy(update={"members": stated, "detectors": names, "files": {}})
            return {"ensemble": record.model_dump(mode="json")}
        if self.distance is not None:
            safetensors.numpy.save_file(self.distance.arrays(), folder / _FEATURES)
        section: dict[str, Any] = {"ranges": self.ranges.model_dump(mode="json")}
        tested = {fold: network for fold, network in sorted(self.networks.folds.items()) if fold != FINAL}
        section["folds"] = [_fold_record(network) for network in tested.values()]
        if FINAL in self.networks.folds:
            section["final"] = _fold_record(self.networks.folds[FINAL])
        return section

    def check(self) -> None:
        """See ``Predictor``."""
        for networks in self._all_networks():
            networks.check()

    def _all_networks(self) -> tuple[Networks, ...]:
        return tuple(member.networks for member in self.members) or (self.networks,)

    @property
    def decode_hash(self) -> str:
        """See ``Predictor``."""
        return self.networks.store.decode_hash

    # --- Identity

    @cached_property
    def model_id(self) -> str:
        """The run or ensemble, and a digest of its weights and of how members are combined."""
        folds, record = self.networks.folds, self.ensemble
        if record is not None:
            rules = [record.method, record.detector_of_member, [rule.model_dump() for rule in record.folds]]
            return f"{self.name}@{sha256_of_json([rules, [each.weights for each in record.members]])[:12]}"
        return f"{self.name}@{sha256_of_json({str(f): folds[f].weights for f in self.networks.judges})[:12]}"

    @cached_property
    def identity(self) -> str:
        """See ``Predictor``."""
        networks = self.networks
        members = [
            [[each.prior_logit, each.temperature] for each in map(of.folds.__getitem__, of.judges)]
            + [[of.store.decode_hash, of.config.clips_per_video]]
            for of in self._all_networks()
        ]
        known = sorted(map(str, self.known.rows.select("label", "content_sha256", "perceptual_hash").rows()))
        more: list[Any] = [members, networks.config.near_duplicate_bits, known, _VERSION]
        more += [self.ranges.model_dump_json(), self.distance.digest if self.distance else ""]
        return f"{self.model_id}:{sha256_of_json(more)[:16]}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Cautions on changed code of the networks that have been loaded so far."""
        return tuple(told for networks in self._all_networks() for told in networks.remarks)

    @property
    def is_above_control(self) -> bool:
        """Whether the model is shown to be above its controls."""
        return self.standing.standing == "above control"

    @cached_property
    def distance(self) -> FeatureDistance | None:
        """The features of the run's videos; of a run they are computed when they are first needed."""
        return self._distance(silent)

    def distance_now(self, tell: Tell) -> FeatureDistance | None:
        """Return ``distance``, computed with progress to ``tell``."""
        if "distance" not in self.__dict__:
            self.distance = self._distance(tell)
        return self.distance

    # --- Findings

    @cached_property
    def place_of(self) -> dict[str, int]:
        """The row of ``known`` of each content; of one that several corpora have, the row with the score."""
        contents, scores = self.known.rows["content_sha256"], self.known.rows["score"]
        places = sorted(range(len(contents)), key=lambda place: scores[place] is not None)
        return {contents[place]: place for place in places}

    @cached_property
    def _footage(self) -> KnownFootage:
        return KnownFootage(self.known.rows["perceptual_hash"].to_list(), self.config.near_duplicate_bits)

    def findings(
        self, files: Sequence[Path], *, workers: int = 0, picture: Picture = no_picture, file_seconds: float = 0.0
    ) -> Generator[Finding]:
        """See ``Predictor``; where one member of an ensemble cannot judge a file, the file has no answer.

        ``picture`` gets the clips of a scored file, uint8 (N, T, 3, S, S). ``file_seconds`` limits the time of a file;
        0: a minute, and a second for each megabyte.
        """
        new = list[Finding]()
        with closing(self._looked(files, workers, picture, file_seconds)) as answers:
            for each in answers:
                if self.members and each.logits and not each.is_known:
                    new.append(each)
                else:
                    yield each
        if new and self.ensemble:
            yield from self._by_members(self.ensemble, new, workers)

    def _looked(self, files: Sequence[Path], workers: int, picture: Picture, file_seconds: float) -> Generator[Finding]:
        """Yield the findings of ``files`` by ``networks``."""
        networks = self.networks
        with scratch_folder(networks.config) as folder:
            clips = [folder / f"{number}.npy" for number in range(len(files))]
            waiting: dict[int, ProbeResult] = {}
            looked = looked_at(networks.store, files, clips, workers=workers, file_seconds=file_seconds)
            with closing(looked) as answers:
                for place, probed, failure in answers:
                    if (unscored := self._unscored(probed, failure)) is not None:
                        clips[place].unlink(missing_ok=True)
                        yield unscored
                        continue
                    waiting[place] = probed
                    if len(waiting) * networks.config.clips_per_video >= networks.batch_size:
                        yield from self._scored(files, clips, waiting, picture)
                        waiting = {}
            yield from self._scored(files, clips, waiting, picture)

    def _unscored(self, probed: ProbeResult, failure: str) -> Finding | None:
        """Return the finding of a file that no network judges, else None; ``failure``: why it has no clip."""
        path, content = probed.path, probed.content_sha256
        if probed.probe is None:
            return Finding(path, failure=f"{probed.reason}: {probed.detail}", lasts=probed.lasts)
        if content in self.place_of:
            video = self.known.rows.row(self.place_of[content], named=True)
            if video["score"] is None:
                told = f"{known_sentence(video)}, of which no score is stored: no prediction."
                return Finding(path, content, is_known=True, no_prediction=(told,))
            return Finding(path, content, is_known=True, logits=(video["logit"] / video["temperature"],))
        if copied := self._footage.copied(probed.perceptual_hash):
            return Finding(path, content, no_prediction=self._copied(copied))
        return Finding(path, content, failure=failure) if failure else None

    def _scored(
        self, files: Sequence[Path], clips: Sequence[Path], waiting: Mapping[int, ProbeResult], picture: Picture
    ) -> Iterator[Finding]:
        """Yield the findings of the ``waiting`` files, by their places."""
        folds, reasons = self.networks.judges, dict[int, tuple[str, ...]]()

        def look(place: int, frames: Pixels) -> None:
            probe = waiting[place].probe
            assert probe is not None
            num_frames = probe.num_frames
            if recipe := self.networks.store.recipe:
                num_frames = recipe_named(recipe).num_shown(num_frames, probe.duration_seconds)
            reasons[place] = (*self._nothing_to_judge(frames, num_frames), *self.ranges.reasons(asdict(probe)))
            picture(waiting[place].path, frames)

        distance, todo = self.distance, {place: FileToScore(files[place], folds) for place in waiting}
        for answer in score_clips(self.networks, todo, clips, seen=look, features=distance is not None):
            each = waiting[answer.position]
            if answer.failure:
                yield Finding(each.path, each.content_sha256, failure=answer.failure, lasts=answer.lasts)
                continue
            logits = tuple(answer.logits[fold] / self.networks.folds[fold].temperature for fold in folds)
            unfamiliar = reasons[answer.position]
            if distance is not None:
                (quantile,) = distance.quantiles({fold: of[None] for fold, of in answer.features.items()}).tolist()
                unfamiliar += (distance.sentence(quantile),) if distance.is_unlike(quantile) else ()
            yield Finding(each.path, each.content_sha256, logits=logits, unfamiliar=unfamiliar)

    def _by_members(self, record: EnsembleRecord, new: list[Finding], workers: int) -> Iterator[Finding]:
        """Yield the findings ``new`` of the leading member with the log odds of all members combined by fold."""
        from fvc_lib.tasks.video.ensembles import of_ensemble  # loads scikit-learn

        folds = tuple(range(len(record.folds)))
        odds = np.full((len(new), len(self.members), len(folds)), np.nan)
        todo = [FileToScore(path_from_text(each.path), folds, content_sha256=each.sha256) for each in new]
        for number, networks in enumerate(self._all_networks()):
            if networks is self.networks:
                odds[:, number] = np.array([each.logits for each in new])
                continue
            with closing(score_files(networks, todo, workers=workers)) as scored:
                for answer in scored:
                    place = answer.position
                    if answer.failure:
                        path, content = new[place].path, new[place].sha256
                        new[place] = Finding(path, content, failure=answer.failure, lasts=answer.lasts)
                    for fold, logit in answer.logits.items():
                        odds[place, number, fold] = logit / networks.folds[fold].temperature
        for place, each in enumerate(new):
            rows = [odds[place, None, :, fold] for fold in folds]
            combined = [
                of_ensemble(row, record.detector_of_member, rule, record.method)
                for row, rule in zip(rows, record.folds, strict=True)
            ]
            yield each if each.failure else replace(each, logits=tuple(float(logits[0]) for logits in combined))

    def _nothing_to_judge(self, clips: Pixels, num_frames: int) -> Iterator[str]:
        """Yield sentences on clips uint8 (N, T, 3, S, S) of a video of ``num_frames`` that show nothing to judge."""
        if num_frames < clips.shape[1]:
            yield (
                f"It has {num_frames} frame{'s' * (num_frames != 1)} and the networks look at {clips.shape[1]}, so "
                "some are shown to them more than once."
            )
        if is_black(clips):
            yield "All frames that the networks see are black: there is nothing to judge."
        elif clips.shape[1] > 1 and is_frozen(clips) and self.networks.sees_order:
            yield "A still: nothing moves in the frames that the networks see, and they look at motion."

    def _copied(self, places: Sequence[int]) -> tuple[str, ...]:
        videos = self.known.rows[list(places)]
        named = [f"{name}, labelled {label}" for name, label in videos.select("video_id", "label").iter_rows()]
        more = f" and {len(named) - _NAMED:,} more" if len(named) > _NAMED else ""
        told = f"A near-duplicate of a video of the run: {'; '.join(named[:_NAMED])}{more}. No prediction."
        if videos["label"].n_unique() == 1:
            return (told,)
        return (told, "Reals and fakes of the run show this footage, so their labels do not tell which this is.")

    def row(self, path: Path, found: Finding) -> Prediction:
        """See ``Predictor``: ``score``, and ``low`` and ``high``, the lowest and highest network's.

        A file of the run has the part ``test``: its score is by the network that had not seen it.
        """
        if not found.logits:
            return Prediction(path, failure=found.failure or " ".join(found.no_prediction))
        scores: list[float] = probabilities(np.array(found.logits), 1.0).tolist()
        if found.is_known:
            scores = [self.known.rows["score"][self.place_of[found.sha256]]]
        values = {"score": mean_of(scores), "low": min(scores), "high": max(scores)}
        return Prediction(path, values, "test" if found.is_known else "")


def index_of_files(run: RunPaths) -> pl.DataFrame:
    """Return INDEX of a run's videos before any re-encoding, with which a new file is compared."""
    return read_table(run.original_index if run.original_index.is_file() else run.index, INDEX)


def _stem(fold: int) -> str:
    return "final" if fold == FINAL else f"fold_{fold}"


def _fold_record(network: FoldNetwork) -> dict[str, Any]:
    return {name: getattr(network, name) for name in FoldRecord.model_fields}


def known_sentence(video: Mapping[str, Any]) -> str:
    """Return the beginning of a sentence on a row of ``KnownVideos.rows``."""
    return f"This is a video of the run, {video['video_id']}, labelled {video['label']}"


def mean_of(scores: Sequence[float]) -> float:
    """Return the mean, exactly rounded: the order of the scores does not matter."""
    return math.fsum(scores) / len(scores)


def decoding_cautions(run: RunPaths, networks: Networks) -> tuple[str, ...]:
    """Return a caution unless files are decoded by the code and library that decoded the run's videos."""
    if not networks.sees_frames:  # no clips; each fitted model names the code that measured
        return ()
    paths = read_table(run.augmented_metadata, AUGMENTED)["clip_path"] if run.augmented_metadata.is_file() else ()
    if {networks.store.decode_folder.name in Path(path).parts for path in paths} == {True}:
        return ()
    check = command_text("robustness", run.root, "--levels", "lossless")
    told = "The code or library that decodes is not known to be that which decoded the run's videos, so scores may not"
    return (f"{told} compare with theirs. Whether they still come out as stored: {check}",)
