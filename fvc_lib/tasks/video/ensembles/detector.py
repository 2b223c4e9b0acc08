"""An ensemble ready to judge files: every member looks with its own eyes, and what they say is put together by fold."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from fvc_lib.services.atomic_files import path_from_text, sha256_of_json
from fvc_lib.services.errors import DataError
from fvc_lib.services.progress import Tell
from fvc_lib.services.records.ensembles import EnsembleRecord, members_of, read_ensemble
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.tasks.bundle_folder import NOT_STATED, Standing
from fvc_lib.tasks.decoding import FileToScore
from fvc_lib.tasks.video.ensembles.combine import of_ensemble
from fvc_lib.tasks.video.verdicts.detector import Finding, Seen, TrainedDetector, decoding_cautions, nobody
from fvc_lib.tasks.video.verdicts.feature_distance import FeatureDistance, distance_of
from fvc_lib.tasks.video.verdicts.rule import KnownVideos
from fvc_lib.tasks.video.verdicts.scoring import Networks, RunNetworks, score_files
from fvc_lib.tasks.video.verdicts.unfamiliar import Familiar


class EnsembleDetector(TrainedDetector):
    """Several runs' networks as one detector.

    ``networks``, by which files are looked at and evidence is drawn, are those of the member with the largest weight.

    Attributes:
        record: how they are put together.
        members: their networks, in the record's order.
    """

    judges_alone = False

    def __init__(
        self,
        record: EnsembleRecord,
        members: Sequence[Networks],
        known: KnownVideos,
        familiar: Familiar,
        standing: Standing = NOT_STATED,
        cautions: Sequence[str] = (),
        distance: Callable[[Tell], FeatureDistance | None] = lambda _tell: None,
    ) -> None:
        self.record, self.members = record, tuple(members)
        lead = members[record.lead]
        told = f"Evidence beside a score is of {lead.name} alone, the member with the largest weight."
        super().__init__(lead, known, familiar, standing, (*dict.fromkeys(cautions), told), distance)

    @cached_property
    def model_id(self) -> str:
        """The ensemble, and a digest of how its members count and of their weights."""
        record = self.record
        rules = [record.method, record.detector_of_member, [rule.model_dump() for rule in record.folds]]
        learned = [[networks.weights(fold) for fold in sorted(networks.folds)] for networks in self.members]
        return f"{record.name}@{sha256_of_json([rules, learned])[:12]}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """See ``TrainedDetector``; of all members."""
        return tuple(told for networks in self.members for told in networks.remarks)

    @cached_property
    def identity(self) -> str:
        """See ``TrainedDetector``."""
        members = self.members
        scales = [[[each.prior_logit, each.temperature] for _, each in sorted(m.folds.items())] for m in members]
        eyes = [[networks.store.decode_hash, networks.config.clips_per_video] for networks in members]
        return f"{self.model_id}:{sha256_of_json([super().identity, scales, eyes])[:16]}"

    def findings(
        self, files: Sequence[Path], *, workers: int = 0, seen: Seen = nobody, file_seconds: float = 0.0
    ) -> Generator[Finding]:
        """As ``TrainedDetector`` has it; where one member cannot judge a file nothing is said of it but why."""
        new = list[Finding]()
        looked = super().findings(files, workers=workers, seen=seen, file_seconds=file_seconds)
        with closing(looked) as answers:
            for each in answers:
                if each.logits and not each.is_known:
                    new.append(each)
                else:
                    yield each
        folds = tuple(range(len(self.record.folds)))
        said = np.full((len(new), len(self.members), len(folds)), np.nan)
        todo = [FileToScore(path_from_text(each.path), folds, content_sha256=each.sha256) for each in new]
        for number, networks in enumerate(self.members):
            if networks is self.networks:
                said[:, number] = np.array([each.logits for each in new]).reshape(len(new), -1)
                continue
            with closing(score_files(networks, todo, workers=workers)) as scored:
                for answer in scored:
                    if answer.failure:
                        each = new[answer.position]
                        new[answer.position] = Finding(
                            each.path, each.sha256, failure=answer.failure, lasts=answer.lasts
                        )
                    for fold, logit in answer.logits.items():
                        said[answer.position, number, fold] = logit / networks.folds[fold].temperature
        of_runs, method = self.record.detector_of_member, self.record.method
        for place, each in enumerate(new):
            by_fold = [
                of_ensemble(said[place, None, :, k], of_runs, rule, method) for k, rule in enumerate(self.record.folds)
            ]
            yield each if each.failure else replace(each, logits=tuple(float(logits[0]) for logits in by_fold))


def ensemble_of(folder: Path, *, held: int | None = None, standing: Standing | None = None) -> EnsembleDetector:
    """Return the detector of an ensemble's folder; ``held`` and ``standing`` as for ``detector_of``.

    Raises:
        DataError: the ensemble or a member is missing, damaged, or not what it was.
        FvcError: as ``RunNetworks`` has it.
    """
    record = read_ensemble(folder)
    members = []
    for run, member in zip(members_of(folder, record), record.members, strict=True):
        networks = RunNetworks(run, held=held)
        if [networks.weights(fold) for fold in sorted(networks.folds)] != member.weights:
            raise DataError(
                f"{run.run_id} was trained anew since it became a member of {record.name}: its weights are others. "
                "Make the ensemble again."
            )
        members.append(networks)
    base_rates = [rule.base_rate for rule in record.folds]
    known = KnownVideos.of(RunPaths(folder.absolute()), range(len(record.folds)), base_rates)
    runs = [networks.paths for networks in members]
    cautions = [told for run, networks in zip(runs, members, strict=True) for told in decoding_cautions(run, networks)]
    lead, familiar = members[record.lead], Familiar.of(known.rows)
    return EnsembleDetector(
        record,
        members,
        known,
        familiar,
        standing or NOT_STATED,
        cautions,
        lambda tell: distance_of(lead, known, tell),
    )
