"""Read the records of ensembles. An ensemble combines the scores of several finished runs, its members.

An ensemble's folder has tables at the same paths as a run folder, but no ``run.json``. It cannot be resumed, and the
trained weights are in the folders of its members. Its record is written last, so a folder with a record is complete.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fvc_lib.services.atomic_files import content_hash, path_from_text
from fvc_lib.services.errors import DataError, command_text
from fvc_lib.services.records.digests import PARAMS, read_document
from fvc_lib.services.run_paths import ENSEMBLE_RECORD

FORMAT: Literal[1] = 1
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class MemberRecord(_Strict):
    """One member run of an ensemble.

    Attributes:
        run_id: name of the run folder.
        path: path of the run folder, relative to the ensemble's folder.
        detector: index in ``EnsembleRecord.detectors``; runs that differ only in their seed share a detector.
        model: the run's parameter ``model``.
        seed: the run's parameter ``seed``.
        weights: digest of the weights (``weights_digest``) per fold; empty if the run has no weights.
    """

    run_id: str
    path: str
    detector: Annotated[int, Field(ge=0)]
    model: str
    seed: int
    weights: list[str]


class FoldRule(_Strict):
    """The decision threshold of an ensemble in one fold, and the share of fakes for which its scores are calibrated.

    Attributes:
        threshold: a video with this score or a higher one counts as fake.
        base_rate: share of fakes among the videos that calibrated the scores. The scores are probabilities for new
            videos only if they have the same share. None: unknown.
    """

    threshold: _Share
    base_rate: Annotated[float, Field(gt=0, lt=1)] | None


class EnsembleRecord(_Strict):
    """The content of ``ensemble.json``, the record of an ensemble.

    Attributes:
        format: version of the file format.
        name: name of the ensemble.
        method: how scores are combined.
        made_with: versions of the software that made the ensemble.
        detectors: names of the detectors. Member runs that differ only in their seed are one detector.
        members: the member runs.
        folds: the rule of each fold.
        files: the SHA-256 of parameters, results and tables, by path in the ensemble's folder.
    """

    format: Literal[1]
    name: Annotated[str, Field(pattern=r"^[^/\\\x00-\x1f\x7f]{1,200}$")]
    method: Literal["mean"]
    made_with: dict[str, str]
    detectors: Annotated[list[str], Field(min_length=1)]
    members: Annotated[list[MemberRecord], Field(min_length=2)]
    folds: Annotated[list[FoldRule], Field(min_length=1)]
    files: dict[str, str]

    @property
    def detector_of_member(self) -> list[int]:
        """Return the number of each member's detector (its index in ``detectors``), in the order of ``members``."""
        return [member.detector for member in self.members]

    @property
    def lead(self) -> int:
        """Return the index in ``members`` of the member run with the largest weight in the ensemble's score."""
        return max(range(len(self.members)), key=self.weight_of_member)

    def weight_of_member(self, number: int) -> float:
        """Return the weight that the scores of member ``number`` (index in ``members``) have in the ensemble's score.

        All detectors have the same weight. The members that share a detector divide its weight equally.
        """
        shared = self.detector_of_member.count(self.members[number].detector)
        return 1 / len(self.detectors) / shared


def read_ensemble(folder: Path) -> EnsembleRecord:
    """Return the record of the ensemble in ``folder``, after checking the digests of the files that it lists.

    Raises:
        DataError: the record or a file is missing or damaged, or the record has another format.
    """
    again = f"Make the ensemble again: {command_text('ensemble', 'RUN', 'RUN...')}"
    try:
        record = EnsembleRecord.model_validate(read_document(folder / ENSEMBLE_RECORD))
    except ValidationError as error:
        raise DataError(f"{folder / ENSEMBLE_RECORD}: is missing, damaged or of another version. {again}") from error
    for name, digest in record.files.items():
        if content_hash(folder / name) != digest:
            raise DataError(f"{folder / name}: is not what the ensemble wrote: missing, damaged or changed. {again}")
    return record


def members_of(folder: Path, record: EnsembleRecord) -> list[Path]:
    """Return the run folders of the members of the ensemble in ``folder``.

    Raises:
        DataError: a run is missing.
    """
    found = [(folder / path_from_text(member.path)).resolve() for member in record.members]
    for run in found:
        if not (run / PARAMS).is_file():
            raise DataError(
                f"{folder.name}: its member {run.name} is not at {str(run)!r}. Bring it back there; an ensemble and "
                "its members move together."
            )
    return found
