"""Judge files with a run, an ensemble or an exported bundle of task video.

A byte-identical copy of a video of the run gets its stored score, by the one network that had not seen it. A
near-duplicate of a video of the run gets no score, because some networks may have been trained on its footage. Every
other file is judged by the networks of all folds. It is decoded as the run decoded its videos
(``verdicts/scoring.py``). In an ensemble every member decodes and judges the file separately, and their log odds are
combined by fold.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Self

import numpy as np
import polars as pl
import safetensors.numpy
from pydantic import Field

from fvc_lib.corpus.probing import ProbeResult
from fvc_lib.metrics.calibration import probabilities
from fvc_lib.services.atomic_files import path_from_text, sha256_of_json
from fvc_lib.services.errors import DataError, UsageError, command_text
from fvc_lib.services.records.ensembles import EnsembleRecord, is_ensemble, members_of, read_ensemble
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.stage_logs import Tell, silent
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
from fvc_lib.video.clips.store import Pixels
from fvc_lib.video.reencode import recipe_named

_logger = logging.getLogger(__name__)

_VERSION = 6  # raised when findings change: stored findings of another version are not reused
_KNOWN, _FEATURES = "known_videos.parquet", "features.safetensors"
_Number = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class Finding:
    """The result of judging one file.

    Attributes:
        path: absolute path, as text for tables (``path_from_text``).
        sha256: hex digest of the file's content; empty if the file could not be read.
        is_known: whether the run has a video with the same content.
        no_prediction: sentences on why a readable file has no score.
        logits: calibrated log odds of fake, one by the network of each fold. A video of the run has only one, by the
            network that had not seen it.
        unfamiliar: sentences that make the verdict undecided whatever the score: the file is unlike the run's videos,
            or shows nothing to judge.
        failure: why the file could not be read; empty if it could.
        lasts: whether another attempt would give the same result; False after a crash or a timeout.
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
    base_rate: Annotated[float, Field(gt=0, lt=1)] | None


class Section(Strict):
    """The section of ``bundle.json`` for a video detector.

    An ensemble fills ``ensemble`` alone, a run the other fields.
    """

    folds: list[FoldRecord] = Field(default_factory=list)
    final: FoldRecord | None = None  # the network of all groups; it then judges alone, without fold networks
    ranges: TrainingRanges | None = None
    ensemble: EnsembleRecord | None = None


class VideoDetector(Predictor):
    """The video detector of a run, an ensemble or a bundle.

    Args:
        networks: the networks that judge; for an ensemble those of the member with the largest weight.
        known: the run's videos, with their out-of-fold scores.
        ranges: codecs, and ranges of size, length and rate, of the run's videos.
        standing: how the model compares with its controls (predictors that see no pixel, or learn other labels).
        cautions: sentences on decoding that may differ from the run's.
        distance: returns the features of the run's videos, to compare new files with; None if they are not available.
        ensemble: the record of how members are combined; None for a single run.
        members: the detectors of the ensemble's members, in the order of its record.
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
        """See ``Predictor``.

        Raises:
            DataError: a member of an ensemble is missing or was trained again.
            UsageError: ``final`` with an ensemble, which has no network of all groups.
        """
        if not is_ensemble(paths.root):
            networks = networks_of_run(paths, held=held, final=final)
            folds = [fold for fold in sorted(networks.folds) if fold != FINAL]
            temperature = networks.folds[FINAL].temperature if final else 0.0
            known = KnownVideos.of(paths, folds, networks.base_rates, final_temperature=temperature)
            ranges, cautions = training_ranges(index_of_files(paths)), decoding_cautions(paths, networks)
            return cls(networks, known, ranges, standing, cautions, lambda tell: distance_of(networks, known, tell))
        if final:
            raise UsageError("--final: an ensemble has no network of all groups. Leave it out.")
        record = read_ensemble(paths.root)
        members = [cls.of_run(run, held=held) for run in members_of(paths.root, record)]
        rates = [rule.base_rate for rule in record.folds]
        return cls._of_members(record, members, KnownVideos.of(paths, range(len(rates)), rates), standing)

    @classmethod
    def of_bundle(cls, bundle: Bundle, *, held: int | None = 1) -> Self:
        """See ``Predictor``."""
        folder, section = bundle.folder, bundle.section(Section)
        rows, record = bundle.table(_KNOWN, KNOWN_VIDEOS), section.ensemble
        if rows.drop_nulls("score")["label"].n_unique() < 2:
            raise refused(folder, f"{_KNOWN} has no scores of both reals and fakes")
        if not set(rows["fold"].drop_nulls()) <= set(range(len(record.folds if record else section.folds))):
            raise refused(folder, f"{_KNOWN} names a fold of which there is no network")
        rows = rows.with_columns(video_id=pl.col("content_sha256").str.head(16))
        if record is not None:
            places = [folder / MEMBERS / str(number) for number in range(len(record.members))]
            opened = [Bundle.open(place, allow_code=bundle.allow_code) for place in places]
            known = KnownVideos(rows, [rule.base_rate for rule in record.folds])
            members = [cls.of_bundle(each, held=held) for each in opened]
            return cls._of_members(record, members, known, bundle.record.standing)
        if section.ranges is None or not section.folds:
            raise refused(folder, "its section has no folds or no ranges")
        by_fold = dict(enumerate(section.folds)) if section.final is None else {FINAL: section.final}
        folds = {
            fold: FoldNetwork(bundle.trained(_stem(fold), fold=name_of(fold)), **each.model_dump())
            for fold, each in by_fold.items()
        }
        networks = Networks(bundle.record.name, bundle.config, folds, held=held)
        known = KnownVideos(rows, networks.base_rates)
        features = bundle.arrays(_FEATURES, lambda arrays: FeatureDistance.of_arrays(arrays, networks.judges))
        return cls(networks, known, section.ranges, bundle.record.standing, (), lambda _: features)

    @classmethod
    def _of_members(
        cls, record: EnsembleRecord, members: Sequence["VideoDetector"], known: KnownVideos, standing: Standing
    ) -> Self:
        """Return the detector of an ensemble.

        Raises:
            DataError: a member has other weights than the ensemble's record states.
        """
        for member, stated in zip(members, record.members, strict=True):
            folds = member.networks.folds
            if [folds[fold].weights for fold in sorted(folds)] != stated.weights:
                raise DataError(
                    f"{member.name}: its weights are not those of {record.name}; it was trained again since it became "
                    "a member, or is another one. Make the ensemble again."
                )
        lead = members[record.lead]
        cautions = dict.fromkeys(caution for member in members for caution in member.cautions)
        evidence = f"Evidence next to a score is of {lead.name} alone, the member with the largest weight."
        return cls(
            lead.networks, known, members[0].ranges, standing, (*cautions, evidence), lead.distance_now,
            ensemble=record, members=members,
        )  # fmt: skip

    def write(self, folder: Path) -> dict[str, Any]:
        """See ``Predictor``."""
        write_table(self.known.anonymous(), KNOWN_VIDEOS, folder / _KNOWN)
        if self.ensemble is None:
            if self.distance is not None:
                safetensors.numpy.save_file(self.distance.arrays(), folder / _FEATURES)
            records = {
                fold: FoldRecord.model_validate(network, from_attributes=True)
                for fold, network in sorted(self.networks.folds.items())
            }
            final = records.pop(FINAL, None)
            return Section(folds=list(records.values()), final=final, ranges=self.ranges).model_dump(mode="json")
        members = []
        for number, (member, stated) in enumerate(zip(self.members, self.ensemble.members, strict=True)):
            place = folder / MEMBERS / str(number)
            place.parent.mkdir(exist_ok=True)
            write_bundle(member, place, f"# {member.name}\n\nA member of {self.name}: see README.md there.\n")
            members.append(stated.model_copy(update={"path": f"{MEMBERS}/{number}"}))
        names = {member.detector: member.model for member in reversed(members)}  # without paths of this machine
        changed = {"members": members, "detectors": [names[place] for place in sorted(names)], "files": {}}
        return Section(ensemble=self.ensemble.model_copy(update=changed)).model_dump(mode="json")

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

    @cached_property
    def model_id(self) -> str:
        """Text ``name@digest``; the digest covers the weights, and for an ensemble how members are combined."""
        record, folds = self.ensemble, self.networks.folds
        decides: Any = {str(fold): folds[fold].weights for fold in self.networks.judges}
        if record is not None:
            rules = [record.method, record.detector_of_member, [rule.model_dump() for rule in record.folds]]
            decides = [rules, [member.weights for member in record.members]]
        return f"{self.name}@{sha256_of_json(decides)[:12]}"

    @cached_property
    def identity(self) -> str:
        """See ``Predictor``."""
        networks = [
            [of.store.decode_hash, of.config.clips_per_video]
            + [[of.folds[fold].prior_logit, of.folds[fold].temperature] for fold in of.judges]
            for of in self._all_networks()
        ]
        known = sorted(map(str, self.known.rows.select("label", "content_sha256", "perceptual_hash").rows()))
        decides = [_VERSION, networks, self.config.near_duplicate_bits, known, self.ranges.model_dump_json()]
        return f"{self.model_id}:{sha256_of_json([*decides, self.distance and self.distance.digest])[:16]}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Cautions on changed code of the networks that have been loaded so far."""
        return tuple(remark for networks in self._all_networks() for remark in networks.remarks)

    @property
    def is_above_control(self) -> bool:
        """Whether the model is shown to be better than its controls."""
        return self.standing.standing == "above control"

    @cached_property
    def distance(self) -> FeatureDistance | None:
        """The features of the run's videos; None if not available. For a run they are computed at the first access."""
        return self._distance(silent)

    def distance_now(self, tell: Tell) -> FeatureDistance | None:
        """Return ``distance``; report the progress to ``tell`` if it is computed now."""
        if "distance" not in self.__dict__:
            self.distance = self._distance(tell)
        return self.distance

    # Findings

    @cached_property
    def place_of(self) -> dict[str, int]:
        """Row number in ``known.rows`` by SHA-256 of the content; of rows with the same content, one with a score."""
        rows = self.known.rows.with_row_index("place").sort(pl.col("score").is_not_null(), maintain_order=True)
        return dict(rows.select("content_sha256", "place").iter_rows())

    @cached_property
    def _footage(self) -> KnownFootage:
        return KnownFootage(self.known.rows["perceptual_hash"].to_list(), self.config.near_duplicate_bits)

    def findings(self, files: Sequence[Path], *, workers: int = 0, picture: Picture = no_picture) -> Generator[Finding]:
        """See ``Predictor``. If one member of an ensemble cannot judge a file, its finding is a failure.

        Args:
            files: paths.
            workers: processes that decode; 0: one per core.
            picture: called with the path and clips, uint8 (N, T, 3, S, S), of each scored file.
        """
        if self.ensemble is None:
            yield from self._looked_at(files, workers, picture)
            return
        new = list[Finding]()
        for finding in self._looked_at(files, workers, picture):
            if finding.logits and not finding.is_known:
                new.append(finding)
            else:
                yield finding
        if new:
            yield from self._by_members(self.ensemble, new, workers)

    def _looked_at(self, files: Sequence[Path], workers: int, picture: Picture) -> Generator[Finding]:
        """Yield the findings of ``networks`` on the files; the arguments are those of ``findings``."""
        networks, waiting = self.networks, dict[int, ProbeResult]()
        with scratch_folder(networks.config) as folder:
            clips = [folder / f"{number}.npy" for number in range(len(files))]
            looked = looked_at(networks.store, files, clips, workers=workers)
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
        """Return the finding on a file that needs no network, else None.

        ``failure`` says why the file has no clip; empty if it has.
        """
        path, content = probed.path, probed.content_sha256
        if probed.probe is None:
            return Finding(path, failure=f"{probed.reason}: {probed.detail}", lasts=probed.lasts)
        if content in self.place_of:
            video = self.known.rows.row(self.place_of[content], named=True)
            if video["score"] is not None:
                return Finding(path, content, is_known=True, logits=(video["logit"] / video["temperature"],))
            reason = f"{known_sentence(video)}, of which no score is stored: no prediction."
            return Finding(path, content, is_known=True, no_prediction=(reason,))
        if places := self._footage.copied(probed.perceptual_hash):
            videos = self.known.rows[places]
            named = [f"{name}, labelled {label}" for name, label in videos.select("video_id", "label").iter_rows()]
            reasons = [f"A near-duplicate of a video of the run: {'; '.join(named[:5])}. No prediction."]
            if videos["label"].n_unique() > 1:
                reasons.append("Reals and fakes of the run show this footage: labels do not tell which this is.")
            return Finding(path, content, no_prediction=tuple(reasons))
        return Finding(path, content, failure=failure) if failure else None

    def _scored(
        self, files: Sequence[Path], clips: Sequence[Path], waiting: Mapping[int, ProbeResult], picture: Picture
    ) -> Iterator[Finding]:
        """Yield the findings on the ``waiting`` files; its keys are indices into ``files`` and ``clips``."""
        folds, reasons, distance = self.networks.judges, dict[int, tuple[str, ...]](), self.distance

        def look(place: int, frames: Pixels) -> None:
            reasons[place] = tuple(self._reasons(waiting[place], frames))
            picture(waiting[place].path, frames)

        todo = {place: FileToScore(files[place], folds) for place in waiting}
        for answer in score_clips(self.networks, todo, clips, seen=look, features=distance is not None):
            path, content = waiting[answer.position].path, waiting[answer.position].content_sha256
            if answer.failure:
                yield Finding(path, content, failure=answer.failure, lasts=answer.lasts)
                continue
            logits = tuple(answer.logits[fold] / self.networks.folds[fold].temperature for fold in folds)
            unfamiliar = reasons[answer.position]
            if distance is not None:
                (quantile,) = distance.quantiles({fold: of[None] for fold, of in answer.features.items()}).tolist()
                unfamiliar += distance.reasons(quantile)
            yield Finding(path, content, logits=logits, unfamiliar=unfamiliar)

    def _reasons(self, probed: ProbeResult, clips: Pixels) -> Iterator[str]:
        """Yield sentences on a file that shows nothing to judge or is unlike the run's videos.

        ``clips`` are its frames, uint8 (N, T, 3, S, S).
        """
        assert probed.probe is not None
        num_frames, num_seen = probed.probe.num_frames, clips.shape[1]
        if recipe := self.networks.store.recipe:
            num_frames = recipe_named(recipe).num_shown(num_frames, probed.probe.duration_seconds)
        if num_frames < num_seen:
            yield (
                f"It has {num_frames} frame{'s' * (num_frames != 1)} and the networks look at {num_seen}, so some are "
                "shown to them more than once."
            )
        if is_black(clips):
            yield "All frames that the networks see are black: there is nothing to judge."
        elif num_seen > 1 and is_frozen(clips):
            yield "A still: nothing moves in the frames that the networks see."
        yield from self.ranges.reasons(asdict(probed.probe))

    def _by_members(self, record: EnsembleRecord, new: list[Finding], workers: int) -> Iterator[Finding]:
        """Yield ``new``, the leading member's findings with log odds, with the ensemble's log odds by fold instead.

        A file that one member cannot judge becomes a failure.
        """
        from fvc_lib.tasks.video.ensembles import of_ensemble  # loads scikit-learn

        folds = tuple(range(len(record.folds)))
        odds = np.full((len(folds), len(new), len(self.members)), np.nan)
        odds[:, :, record.lead] = np.array([each.logits for each in new]).T
        todo = [FileToScore(path_from_text(each.path), folds, content_sha256=each.sha256) for each in new]
        for number, networks in enumerate(self._all_networks()):
            if number == record.lead:
                continue
            with closing(score_files(networks, todo, workers=workers)) as scored:
                for answer in scored:
                    place = answer.position
                    if answer.failure:
                        failed = new[place]
                        new[place] = Finding(failed.path, failed.sha256, failure=answer.failure, lasts=answer.lasts)
                    for fold, logit in answer.logits.items():
                        odds[fold, place, number] = logit / networks.folds[fold].temperature
        rules = zip(odds, record.folds, strict=True)
        combined = [of_ensemble(rows, record.detector_of_member, rule, record.method) for rows, rule in rules]
        for finding, logits in zip(new, np.transpose(combined).tolist(), strict=True):
            yield finding if finding.failure else replace(finding, logits=tuple(logits))

    def row(self, path: Path, found: Finding) -> Prediction:
        """See ``Predictor``. ``score`` is the mean over networks, ``low`` and ``high`` the lowest and highest score.

        A video of the run has the part ``test``: its score is by the network that had not seen it.
        """
        if not found.logits:
            return Prediction(path, failure=found.failure or " ".join(found.no_prediction))
        scores: list[float] = probabilities(np.array(found.logits), 1.0).tolist()
        if found.is_known:
            scores = [self.known.rows["score"][self.place_of[found.sha256]]]
        values = {"score": fmean(scores), "low": min(scores), "high": max(scores)}
        return Prediction(path, values, "test" if found.is_known else "")


def _stem(fold: int) -> str:
    return "final" if fold == FINAL else f"fold_{fold}"


def index_of_files(run: RunPaths) -> pl.DataFrame:
    """Return INDEX of the run's original videos, before any re-encoding. New files are compared with these."""
    return read_table(run.original_index if run.original_index.is_file() else run.index, INDEX)


def known_sentence(video: Mapping[str, Any]) -> str:
    """Return the beginning of a sentence that names the video of the run and its label."""
    return f"This is a video of the run, {video['video_id']}, labelled {video['label']}"


def decoding_cautions(run: RunPaths, networks: Networks) -> tuple[str, ...]:
    """Return a caution if the decoding code or library may differ from that of the run's videos; else nothing."""
    if not networks.sees_frames:  # no clips; a fitted model names the code that measured its features
        return ()
    paths = read_table(run.augmented_metadata, AUGMENTED)["clip_path"] if run.augmented_metadata.is_file() else ()
    if {networks.store.decode_folder.name in Path(path).parts for path in paths} == {True}:
        return ()
    caution = (
        "The code or library that decodes is not known to be that which decoded the run's videos, so scores may not "
        f"compare with theirs. To check: {command_text('robustness', run.root, '--levels', 'lossless')}"
    )
    return (caution,)
