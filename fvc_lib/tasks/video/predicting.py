"""Judge files with a run, an ensemble or an exported bundle of task video.

A byte-identical copy of a video of the run gets its stored score, by the one network that had not seen it. A
near-duplicate of a video of the run gets no score, because some networks may have been trained on its footage. Every
other file is judged by the networks of all folds. It is decoded as the run decoded its videos
(``verdicts/scoring.py``). In an ensemble every member decodes and judges the file separately. For every fold, the log
odds of the members are then combined.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from fvc_lib.metrics.calibration import mean_log_odds
from fvc_lib.metrics.classification import FloatArray
from fvc_lib.services.atomic_files import atomic_output, sha256_of_json
from fvc_lib.services.checkpoint_files import BEST
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError, command_text
from fvc_lib.services.parameters import run_config
from fvc_lib.services.records.digests import refuse_damaged, undamaged_content
from fvc_lib.services.records.ensembles import EnsembleRecord, members_of, read_ensemble
from fvc_lib.services.run_paths import RunPaths, is_ensemble
from fvc_lib.services.tables import (
    AUGMENTED,
    FINAL_VALIDATION,
    INDEX,
    KNOWN_VIDEOS,
    PREDICTIONS,
    read_table,
    write_table,
)
from fvc_lib.services.tasks import DEFAULT_TASK, FINAL_TRAINING, FOLD_TRAINING
from fvc_lib.tasks.bundle import MEMBERS, Bundle, refused, write_bundle
from fvc_lib.tasks.decoding import DecodedFile, FileToScore, looked_at, scratch_folder
from fvc_lib.tasks.predicting import NOT_STATED, Predictor, Standing, Strict, finished_training
from fvc_lib.tasks.video.summary import TrainingSummary
from fvc_lib.tasks.video.verdicts.rule import KnownVideos
from fvc_lib.tasks.video.verdicts.scoring import (
    FINAL,
    FoldNetwork,
    Networks,
    half_of_the_cores,
    name_of,
    score_decoded,
)
from fvc_lib.tasks.video.verdicts.unfamiliar import (
    FeatureDistance,
    TrainingRanges,
    copies,
    distance_of,
    is_black,
    is_frozen,
    training_ranges,
)
from fvc_lib.video.clips.store import Pixels
from fvc_lib.video.reencode import recipe_named

_VERSION = 7  # raised when findings change: stored findings of another version are not reused
_KNOWN = "known_videos.parquet"
_FEATURES = "features.safetensors"
_WEIGHTS = "weights"
_Number = Annotated[float, Field(allow_inf_nan=False)]


class CellNetworkError(UsageError):
    """The error that a network's class was written in a notebook cell, so that no other program can build it."""


@dataclass(frozen=True)
class Finding:
    """The result of judging one file.

    Attributes:
        path: absolute path, as tables store it (``path_from_text`` returns the path).
        sha256: hex digest of the file's content; empty if the file could not be read.
        is_known: whether the run has a video with the same content.
        no_prediction: sentences on why a readable file has no score.
        logits: calibrated log odds of fake, one number per fold, by the fold's network. A video of the run has a single
            number, by the network that had not seen it.
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
    """The numbers that turn a network's output into a calibrated probability of fake.

    Attributes:
        prior_logit: number that is added to the output.
        temperature: divisor of that sum.
        base_rate: share of fakes among the videos on which the scores were calibrated; None: not known.
    """

    prior_logit: _Number
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    base_rate: Annotated[float, Field(gt=0, lt=1)] | None


class Section(Strict):
    """The section of ``bundle.json`` for a video detector.

    Attributes:
        ranges: codecs, and ranges of size, length and rate, of the run's videos.
        folds: one record per fold, in the order of the folds; empty if ``final`` or ``ensemble`` is given.
        final: the record of the network trained on all groups, which then judges alone; else None.
        ensemble: how the members of an ensemble are combined; None for a single run.
    """

    ranges: TrainingRanges
    folds: list[FoldRecord] = Field(default_factory=list)
    final: FoldRecord | None = None  # the network trained on all groups; it judges alone, without fold networks
    ensemble: EnsembleRecord | None = None


class VideoDetector(Predictor):
    """The video detector of a run, an ensemble or a bundle (an exported folder that needs no run).

    Args:
        networks: the networks that judge; for an ensemble those of the member with the largest weight.
        known: the run's videos, with their out-of-fold scores.
        ranges: codecs, and ranges of size, length and rate, of the run's videos.
        standing: how the model compares with its controls (predictors that see no pixel, or learn other labels).
        distance: function that returns the features of the run's videos, to compare new files with; it returns None if
            they are not available.
        cautions: sentences on decoding that may differ from the run's.
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
        distance: Callable[[], FeatureDistance | None] = lambda: None,
        cautions: tuple[str, ...] = (),
        ensemble: EnsembleRecord | None = None,
        members: Sequence["VideoDetector"] = (),
    ) -> None:
        trained = {} if ensemble else {_stem(fold): networks.folds[fold].trained for fold in networks.judges}
        name = ensemble.name if ensemble else networks.name
        super().__init__(name, networks.config, trained, standing)
        self.networks, self.known, self.ranges, self.cautions = networks, known, ranges, cautions
        self.ensemble, self.members, self._distance = ensemble, members, distance
        self._all_networks = [member.networks for member in members] or [networks]

    # Loaders

    @classmethod
    def of_run(cls, paths: RunPaths, standing: Standing = NOT_STATED, *, final: bool = False) -> Self:
        """Return the detector of a finished run or an ensemble.

        Args:
            paths: paths of the run or ensemble.
            standing: how the model compares with its controls.
            final: whether to judge with the network that was trained on all groups, instead of the networks of the
                folds.

        Raises:
            DataError: a member of an ensemble is missing or was trained again.
            UsageError: the run is not finished; or ``final``, and there is no network trained on all groups.
            FvcError: a file of the run is damaged.
        """
        if is_ensemble(paths.root):
            record = read_ensemble(paths.root)
            members = [cls.of_run(RunPaths(run)) for run in members_of(paths.root, record)]
            rates = [rule.base_rate for rule in record.folds]
            return cls._of_members(record, members, known_videos(paths, range(len(rates)), rates), standing)
        networks = networks_of_run(paths, final=final)
        folds = sorted(networks.folds.keys() - {FINAL})
        temperature = networks.folds[FINAL].temperature if final else 0.0
        known = known_videos(paths, folds, networks.base_rates, final_temperature=temperature)
        return cls(
            networks,
            known,
            training_ranges(index_of_files(paths)),
            standing,
            lambda: stored_distance(paths, networks),
            decoding_cautions(paths, networks),
        )

    @classmethod
    def of_bundle(cls, bundle: Bundle) -> Self:
        """Return the detector of an opened bundle.

        Raises:
            FvcError: a file of the bundle has invalid content.
        """
        folder = bundle.folder
        standing = bundle.record.standing
        section = bundle.section(Section)
        record = section.ensemble
        rates = [rule.base_rate for rule in (record.folds if record else section.folds)]
        rows = read_table(folder / _KNOWN, KNOWN_VIDEOS).with_columns(video_id=pl.col("content_sha256").str.head(16))
        scored = rows.drop_nulls("score")
        if scored["label"].n_unique() < 2 or not scored["fold"].is_between(0, len(rates) - 1).all():
            raise refused(folder, f"{_KNOWN} has no scores of both reals and fakes by the network of a fold")
        if record is not None:
            opened = [
                Bundle.open(folder / MEMBERS / str(number), allow_code=bundle.allow_code)
                for number in range(len(record.members))
            ]
            return cls._of_members(record, list(map(cls.of_bundle, opened)), KnownVideos(rows, rates), standing)
        records = dict(enumerate(section.folds)) if section.final is None else {FINAL: section.final}
        folds = {
            fold: FoldNetwork(bundle.trained(_stem(fold), fold=name_of(fold)), **stored.model_dump())
            for fold, stored in records.items()
        }
        networks = Networks(bundle.record.name, bundle.config, folds)
        features = bundle.arrays(_FEATURES, lambda arrays: FeatureDistance.of_arrays(arrays, networks.judges))
        known = KnownVideos(rows, networks.base_rates)
        return cls(networks, known, section.ranges, standing, lambda: features)

    @classmethod
    def _of_members(
        cls, record: EnsembleRecord, members: Sequence["VideoDetector"], known: KnownVideos, standing: Standing
    ) -> Self:
        """Return the detector of an ensemble.

        Args:
            record: the record of the ensemble.
            members: the detectors of its members, in the order of the record.
            known: the members' videos, with the ensemble's scores.
            standing: how the ensemble compares with its controls.

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
        for member in members:
            if member is not lead:
                member.distance = None  # the features of one member are enough to find unfamiliar files
        evidence = f"Evidence next to a score is of {lead.name} alone, the member with the largest weight."
        cautions = dict.fromkeys(caution for member in members for caution in (*member.cautions, evidence))
        return cls(lead.networks, known, lead.ranges, standing, lambda: lead.distance, tuple(cautions), record, members)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write this detector's files of a bundle to ``folder``, and return its section of ``bundle.json`` as a dict.

        The files are the table of the run's videos and the features of these videos. An ensemble has a bundle of each
        member instead of the features. ``of_bundle`` reads the files.
        """
        write_table(self.known.anonymous(), KNOWN_VIDEOS, folder / _KNOWN)
        if self.ensemble is not None:
            section = Section(ranges=self.ranges, ensemble=self._write_members(folder, self.ensemble))
            return section.model_dump(mode="json")
        if self.distance is not None:
            safetensors.numpy.save_file(self.distance.arrays(), folder / _FEATURES)
        records = {
            fold: FoldRecord.model_validate(network, from_attributes=True)
            for fold, network in sorted(self.networks.folds.items())
        }
        final = records.pop(FINAL, None)
        return Section(ranges=self.ranges, folds=list(records.values()), final=final).model_dump(mode="json")

    def _write_members(self, folder: Path, record: EnsembleRecord) -> EnsembleRecord:
        """Write a bundle of every member into ``folder``, and return a copy of ``record`` for the ensemble's bundle.

        The copy has paths in the bundle instead of this machine's paths, and no names of detectors.
        """
        members = []
        for number, (member, stated) in enumerate(zip(self.members, record.members, strict=True)):
            place = f"{MEMBERS}/{number}"
            write_bundle(member, folder / place, f"# {member.name}\n\nA member of {self.name}: see README.md there.\n")
            members.append(stated.model_copy(update={"path": place}))
        names = [f"detector {number}" for number in range(len(record.detectors))]
        return record.model_copy(update={"members": members, "detectors": names, "files": {}})

    # Facts

    def check(self) -> None:
        """Load every network once, to raise errors before any file is decoded."""
        for networks in self._all_networks:
            networks.load(networks.folds)

    @property
    def decode_hash(self) -> str:
        """The hex SHA-256 of the code and the libraries that decode videos."""
        return self.networks.store.decode_hash

    @cached_property
    def model_id(self) -> str:
        """The detector's id in verdicts, ``name@digest``.

        The digest covers the weights, and for an ensemble how its members are combined.
        """
        record, folds = self.ensemble, self.networks.folds
        decides: Any = {str(fold): folds[fold].weights for fold in self.networks.judges}
        if record is not None:
            rules = [record.method, record.detector_of_member, [rule.model_dump() for rule in record.folds]]
            decides = [rules, [member.weights for member in record.members]]
        return f"{self.name}@{sha256_of_json(decides)[:12]}"

    @cached_property
    def identity(self) -> str:
        """A text that identifies the detector's behaviour.

        It changes with everything that affects a finding, such as weights, settings or the run's videos.
        """
        decides: list[Any] = [_VERSION, self.config.near_duplicate_bits, self.ranges.model_dump_json()]
        for networks in self._all_networks:
            folds = [networks.folds[fold] for fold in networks.judges]
            decides += [networks.store.decode_hash, networks.measured_by, networks.config.clips_per_video]
            decides += [(fold.prior_logit, fold.temperature) for fold in folds]
        known = self.known.rows.select("label", "content_sha256", "perceptual_hash")
        decides += sorted(map(str, known.rows()))
        if self.distance is not None:
            decides.append(self.distance.digest)
        return f"{self.model_id}:{sha256_of_json(decides)[:16]}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences on library code that changed since the training, for the networks that have been loaded so far."""
        return tuple(remark for networks in self._all_networks for remark in networks.remarks)

    @property
    def is_above_control(self) -> bool:
        """Whether the model is shown to be better than its controls."""
        return self.standing.standing == "above control"

    @cached_property
    def distance(self) -> FeatureDistance | None:
        """The features of the run's videos, which measure how unlike them a new video is; None if not available.

        A bundle stores these features. Those of a run are read at the first access.
        """
        return self._distance()

    @cached_property
    def place_of(self) -> dict[str, int]:
        """A dict from the SHA-256 of a video's content to the video's row number in ``known.rows``.

        If several rows have the same content, a row with a score is used.
        """
        has_score = pl.col("score").is_not_null()
        rows = self.known.rows.with_row_index("place").sort(has_score, maintain_order=True)
        return dict(rows.select("content_sha256", "place").iter_rows())

    # Findings

    def findings(self, files: Sequence[Path], *, workers: int = 0) -> Generator[Finding]:
        """Yield one finding per file, in any order: the file's scores, or why it has none.

        If a member of an ensemble cannot judge a file, the ensemble yields that member's finding.

        Args:
            files: absolute paths without repeats.
            workers: number of processes that decode; 0: one per core.
        """
        if self.ensemble is None:
            yield from self._looked_at(files, workers)
            return
        found = list[dict[str, Finding]]()
        for member in self.members:
            found.append({finding.path: finding for finding in member.findings(files, workers=workers)})
        for path in found[0]:
            yield self._combined(self.ensemble, [by_path[path] for by_path in found])

    def _combined(self, record: EnsembleRecord, found: Sequence[Finding]) -> Finding:
        """Return the ensemble's finding on a file.

        Args:
            record: the record of the ensemble.
            found: the findings of the members on this file, in the order of the record.
        """
        lead = found[record.lead]
        if lead.sha256 in self.place_of:
            return self._of_known(lead.path, lead.sha256)
        for finding in found:
            if not finding.logits:
                return replace(finding, is_known=False)
        odds = np.array([finding.logits for finding in found])
        detectors = record.detector_of_member
        return replace(lead, logits=tuple(of_ensemble(odds.T, detectors).tolist()))

    def _looked_at(self, files: Sequence[Path], workers: int) -> Generator[Finding]:
        """Yield the findings of this detector's own networks; members of an ensemble are not used.

        ``files`` are absolute paths. ``workers`` is the number of processes that decode; 0: one per core.
        """
        networks, distance = self.networks, self.distance
        probes = dict[int, ProbeResult]()
        unscored = dict[int, Finding]()
        reasons = dict[int, tuple[str, ...]]()

        def decoded(answers: Iterable[tuple[ProbeResult, DecodedFile]]) -> Iterator[DecodedFile]:
            for probed, answer in answers:
                if (finding := self._unscored(probed, answer.failure)) is not None:
                    clips[answer.position].unlink(missing_ok=True)
                    unscored[answer.position] = finding
                    answer = replace(answer, failure="no network has to judge it")
                else:
                    loading.result()
                probes[answer.position] = probed
                yield answer

        def look(place: int, frames: Pixels) -> None:
            reasons[place] = tuple(self._reasons(probes[place], frames))

        with scratch_folder(networks.config) as folder, half_of_the_cores(), ThreadPoolExecutor(1) as threads:
            # The networks are loaded while the first file is decoded.
            loading: Future[Any] = threads.submit(networks.load, networks.judges if files else ())
            clips = [folder / f"{number}.npy" for number in range(len(files))]
            todo = [FileToScore(file, networks.judges) for file in files]
            with closing(looked_at(networks.store, files, clips, networks.families, workers=workers)) as answers:
                options = {"seen": look, "features": distance is not None}
                for scored in score_decoded(networks, todo, clips, decoded(answers), **options):
                    if scored.position in unscored:
                        yield unscored[scored.position]
                        continue
                    probed = probes[scored.position]
                    unfamiliar = reasons[scored.position]
                    if distance is not None:
                        features = {fold: row[None] for fold, row in scored.features.items()}
                        quantiles = distance.quantiles(features)
                        unfamiliar += distance.reasons(float(quantiles[0]))
                    folds = networks.folds
                    logits = tuple(logit / folds[fold].temperature for fold, logit in scored.logits.items())
                    yield Finding(probed.path, probed.content_sha256, logits=logits, unfamiliar=unfamiliar)

    def _unscored(self, probed: ProbeResult, failure: str) -> Finding | None:
        """Return the finding on a file if it is known without the networks; None if the networks must judge the file.

        It is known if the file cannot be read, has no clip, or is a video of the run or a near-duplicate of one.
        ``failure`` says why the file has no clip; it is empty if there is a clip.
        """
        path, content = probed.path, probed.content_sha256
        if probed.probe is None:
            return Finding(path, failure=f"{probed.reason}: {probed.detail}", lasts=probed.lasts)
        if content in self.place_of:
            return self._of_known(path, content)
        hashes = self.known.rows["perceptual_hash"].to_list()
        if places := copies(hashes, probed.perceptual_hash, self.config.near_duplicate_bits):
            videos = self.known.rows[places].select("video_id", "label")
            named = "; ".join(f"{name}, labelled {label}" for name, label in videos.iter_rows())
            reason = f"A near-duplicate of a video of the run: {named}. No prediction."
            return Finding(path, content, no_prediction=(reason,))
        return Finding(path, content, failure=failure) if failure else None

    def _of_known(self, path: str, content: str) -> Finding:
        """Return the finding on a video of the run: its stored log odds, or a sentence that no score is stored.

        ``content`` is the SHA-256 of the file's content.
        """
        video = self.known.rows.row(self.place_of[content], named=True)
        if video["score"] is not None:
            return Finding(path, content, is_known=True, logits=(video["logit"] / video["temperature"],))
        reason = f"{known_sentence(video)}, of which no score is stored: no prediction."
        return Finding(path, content, is_known=True, no_prediction=(reason,))

    def _reasons(self, probed: ProbeResult, clips: Pixels) -> Iterator[str]:
        """Yield sentences on why a file is unlike the run's videos, or shows nothing to judge.

        Args:
            probed: the measured facts of the file, such as size and codec.
            clips: its frames as the networks see them, uint8 (N, T, 3, S, S).
        """
        assert probed.probe is not None
        num_frames, num_seen = probed.probe.num_frames, clips.shape[1]
        if recipe := self.networks.store.recipe:
            num_frames = recipe_named(recipe).num_shown(num_frames, probed.probe.duration_seconds)
        if num_frames < num_seen:
            yield f"It has {num_frames} frames and the networks look at {num_seen}, so some are shown again."
        if is_black(clips):
            yield "All frames that the networks see are black: there is nothing to judge."
        elif num_seen > 1 and is_frozen(clips):
            yield "A still: nothing moves in the frames that the networks see."
        yield from self.ranges.reasons(asdict(probed.probe))


def of_ensemble(log_odds: FloatArray, detectors: Sequence[int]) -> FloatArray:
    """Return the mean probability of fake of an ensemble's detectors for N videos, as log odds, float64 (N,).

    The probability of a detector is the mean over its runs.

    Args:
        log_odds: float64 (N, R), log odds by the networks of R runs, all of the same fold; NaN is missing.
        detectors: R numbers from 0 to C - 1, the detector of each run.
    """
    places = np.asarray(detectors)
    by_detector = [mean_log_odds(log_odds[:, places == place]) for place in range(places.max() + 1)]
    return mean_log_odds(np.stack(by_detector, axis=1))


def _stem(fold: int) -> str:
    return "final" if fold == FINAL else f"fold_{fold}"


def networks_of_run(paths: RunPaths, folds: Collection[int] | None = None, *, final: bool = False) -> Networks:
    """Return the networks of a run.

    Args:
        paths: the run.
        folds: numbers of the folds; None: all.
        final: whether to add the network trained on all groups, which then judges new videos alone.

    Raises:
        UsageError: the run is of another task, or one of its trainings is not finished.
        DataError: a file of the run is damaged.
    """
    refuse_damaged(paths.root, logs=False)
    config = run_config(paths.params_yaml)
    if config.task != DEFAULT_TASK:
        raise UsageError(f"{paths.run_id} is of task {config.task}; videos are scored by runs of {DEFAULT_TASK}.")
    wanted = range(config.num_trainings) if folds is None else sorted(folds)
    networks = {fold: _fold_network(paths, config, fold) for fold in wanted}
    if final:
        network = _fold_network(paths, config, FINAL)
        networks[FINAL] = replace(network, temperature=network.temperature * held_back(paths, networks))
    return Networks(paths.run_id, config, networks)


def _fold_network(paths: RunPaths, config: RunConfig, fold: int) -> FoldNetwork:
    """Return the network of ``fold``; for ``FINAL``, the network trained on all groups.

    Raises:
        UsageError: its training is not finished.
    """
    stage, number = (FINAL_TRAINING, None) if fold == FINAL else (FOLD_TRAINING, fold)
    name = f"{paths.run_id}, {name_of(fold)}"
    trained, outcome = finished_training(paths, config, stage, number, TrainingSummary, name)
    if (kind := outcome.network.name).startswith("__main__."):
        raise CellNetworkError(
            f"{name}: its network {kind.removeprefix('__main__.')} stands in a notebook's "
            "cell, where no command finds it. To ask it about files, put the class into one, and train with "
            "-p model FILE.py:CLASS."
        )
    training, chosen = outcome.training, outcome.training.selection
    return FoldNetwork(trained, chosen.prior_logit, training.temperature, chosen.base_rate, outcome.device)


def held_back(paths: RunPaths, folds: Collection[int]) -> float:
    """Return a number, at least 1, by which to divide the log odds of the network that was trained on all groups.

    The network's temperature may be fitted on the few videos that also chose its epoch. Its log odds may then be too
    large, so they are scaled down to the size of the out-of-fold log odds.

    The divisor is a ratio of two medians over the videos that calibrated the network: the median of the network's
    absolute log odds, divided by the median of the absolute out-of-fold log odds.

    Raises:
        UsageError: none of these videos has an out-of-fold score.
    """
    size = (pl.col("logit") / pl.col("temperature")).abs()
    stored = stored_predictions(paths, folds)
    both = read_table(paths.final_validation, FINAL_VALIDATION).select("video_id", mine=size)
    both = both.join(stored.select("video_id", theirs=size), on="video_id")
    if not both.height:
        raise UsageError(
            f"{paths.run_id}: none of the videos that chose the epoch or temperature of the network of all groups is "
            "tested by a fold, so its scores cannot be compared with theirs. Leave --final out."
        )
    mine, theirs = both.select("mine", "theirs").median().row(0)
    return max(1.0, mine / theirs) if theirs else 1.0


def stored_predictions(paths: RunPaths, folds: Iterable[int]) -> pl.DataFrame:
    """Return the predictions of the test videos of ``folds`` (PREDICTIONS) as one table."""
    return pl.concat([read_table(paths.predictions(fold), PREDICTIONS) for fold in folds])


def known_videos(
    paths: RunPaths, folds: Iterable[int], base_rates: Sequence[float | None] = (), *, final_temperature: float = 0.0
) -> KnownVideos:
    """Return the videos of a run or ensemble, with their out-of-fold scores.

    Args:
        paths: the run or ensemble.
        folds: numbers of the folds whose predictions are read.
        base_rates: the share of fakes on which the scores of each judging network were calibrated; None: not known.
        final_temperature: temperature of the network trained on all groups. If above 0, this network's stored logits
            are divided by it and added as the column ``final_logit``.
    """
    scores = stored_predictions(paths, folds).select("video_id", "fold", "score", "logit", "temperature")
    by_final = pl.DataFrame(schema={"video_id": pl.String, "final_logit": pl.Float64})
    if final_temperature:
        by_final = read_table(paths.final_validation, FINAL_VALIDATION)
        by_final = by_final.select("video_id", final_logit=pl.col("logit") / final_temperature)
    rows = read_table(paths.index, INDEX)
    for more in (scores, by_final):
        rows = rows.join(more, on="video_id", how="left", maintain_order="left")
    return KnownVideos(rows, base_rates)


def write_features(paths: RunPaths, *, final: bool = False) -> None:
    """Write the features of a run's tested videos to a file; the command ``predict`` compares new files with them.

    If weights of the folds are gone, for example deleted by ``clean --models``, nothing is written. If the network's
    class was written in a notebook cell, nothing is written and a sentence is printed.

    Args:
        paths: the run; its clips must be in the store, else no features are stored.
        final: whether the network trained on all groups computes them, instead of the networks of the folds.

    Raises:
        UsageError: the run is not finished, or ``final`` and there is no network trained on all groups.
        FvcError: a file of the run is damaged.
        OSError: the file cannot be written.
    """
    weights = [paths.fold_checkpoints(fold) / BEST for fold in range(run_config(paths.params_yaml).num_trainings)]
    if not final and not all(file.is_file() for file in weights):
        return
    try:
        detector = VideoDetector.of_run(paths, final=final)
    except CellNetworkError as error:
        print(error)
        return
    networks = detector.networks
    distance = distance_of(detector.networks, detector.known)
    arrays = distance.arrays() if distance else {}
    arrays[_WEIGHTS] = np.frombuffer(networks.digests, np.uint8)
    with atomic_output(paths.final_features if final else paths.test_features) as temporary:
        safetensors.numpy.save_file(arrays, temporary)


def stored_distance(paths: RunPaths, networks: Networks) -> FeatureDistance | None:
    """Return the stored features of the run's tested videos, with which new files are compared.

    ``write_features`` stored them. The result is None if that function found no features, or if the networks see no
    frames.

    Raises:
        DataError: the file is missing or damaged, or other networks computed its features.
    """
    path, stage = paths.test_features, "05"
    if FINAL in networks.judges:
        path, stage = paths.final_features, "04b"
    if not networks.sees_frames:
        return None
    arrays = safetensors.numpy.load(undamaged_content(path)) if path.is_file() else {}
    if arrays.pop(_WEIGHTS, np.empty(0)).tobytes() != networks.digests:
        raise DataError(
            f"{path}: is missing, or of other networks than the run has now. To write it: "
            f"{command_text('--only', stage, '--resume', paths.root)}"
        )
    return FeatureDistance.of_arrays(arrays, networks.judges) if arrays else None


def index_of_files(run: RunPaths) -> pl.DataFrame:
    """Return the index of the run's original videos (table INDEX, one row per video), before any re-encoding.

    The codecs, sizes and lengths of new files are compared with these.
    """
    return read_table(run.original_index if run.original_index.is_file() else run.index, INDEX)


def known_sentence(video: Mapping[str, Any]) -> str:
    """Return the beginning of a sentence that names a video of the run and its label.

    ``video`` is a row of ``KnownVideos.rows``.
    """
    return f"This is a video of the run, {video['video_id']}, labelled {video['label']}"


def decoding_cautions(run: RunPaths, networks: Networks) -> tuple[str, ...]:
    """Return one caution if other code or libraries may have decoded the run's videos; else an empty tuple.

    In that case, scores of new files may not be comparable with the stored scores.
    """
    if not networks.sees_frames:  # no clips; a fitted model names the code that measured its features
        return ()
    paths = read_table(run.augmented_metadata, AUGMENTED)["clip_path"] if run.augmented_metadata.is_file() else ()
    are_of_decoder = {networks.store.decode_folder.name in Path(path).parts for path in paths}
    if are_of_decoder == {True}:
        return ()
    caution = (
        "The code or library that decodes is not known to be that which decoded the run's videos, so scores may not "
        f"compare with theirs. To check: {command_text('robustness', run.root, '--levels', 'lossless')}"
    )
    return (caution,)
