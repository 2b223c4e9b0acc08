"""An ensemble as one folder that needs neither its runs nor their corpus: a bundle of each member, and how they count.

Like a member's bundle it is read as if a stranger had made it: no link, no file too many, and each with its digest.
"""

from collections.abc import Sequence
from pathlib import Path

import polars as pl
from pydantic import ValidationError

from fvc_lib.services.atomic_files import sha256_of_file, write_json, write_text
from fvc_lib.services.errors import DataError
from fvc_lib.services.records.digests import write_document
from fvc_lib.services.records.ensembles import RECORD, EnsembleRecord, members_of, read_ensemble
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import CALIBRATION, INDEX, PREDICTIONS, read_table, write_table
from fvc_lib.tasks import bundle_folder
from fvc_lib.tasks.bundle_folder import CARD, DIGESTS, Standing, new_folder
from fvc_lib.tasks.video.ensembles.detector import EnsembleDetector
from fvc_lib.tasks.video.verdicts import bundle as bundles
from fvc_lib.tasks.video.verdicts.bundle import BundleNetworks
from fvc_lib.tasks.video.verdicts.rule import KnownVideos
from fvc_lib.tasks.video.verdicts.unfamiliar import Familiar

_MEMBERS, _STANDING, _CALIBRATION = "members", "standing.json", "calibration.parquet"


def write_ensemble_bundle(
    source: RunPaths, folder: Path, standing: Standing, card: str, members: Sequence[tuple[Standing, str]]
) -> EnsembleRecord:
    """Write the ensemble in ``source`` to ``folder``, which is there whole or not at all, and load it from there.

    Args:
        source: the ensemble's folder.
        folder: not there yet.
        standing: where the ensemble stands.
        card: its model card.
        members: the same of each member.

    Raises:
        DataError: the ensemble or a member is missing or damaged.
        UsageError, FvcError, OSError: as ``write_bundle``.
    """
    record = read_ensemble(source.root)
    with new_folder(folder) as building:
        files, told = [], []
        for number, (run, member) in enumerate(zip(members_of(source.root, record), record.members, strict=True)):
            place = f"{_MEMBERS}/{number}"
            of_run, _ = bundles.write_bundle(run, building / place, *members[number])
            if [fold.weights for fold in of_run.folds] != member.weights:
                raise DataError(f"{run.run_id} was trained anew since it became a member. Make the ensemble again.")
            files.append(f"{place}/{DIGESTS}")
            told.append(member.model_copy(update={"path": place}))
        index = read_table(source.index, INDEX)
        said = pl.concat([read_table(source.predictions(fold), PREDICTIONS) for fold in range(len(record.folds))])
        write_table(bundles.calibration_table(index, said), CALIBRATION, building / _CALIBRATION)
        write_json(building / _STANDING, standing.model_dump(mode="json"))
        write_text(building / CARD, card)
        files += [_CALIBRATION, _STANDING, CARD]
        firsts = [record.detector_of_member.index(place) for place in range(len(record.detectors))]
        changed = {
            "members": told,
            "detectors": [record.members[first].model for first in firsts],  # names may have places of this machine
            "files": {name: sha256_of_file(building / name) for name in files},
        }
        exported = record.model_copy(update=changed)
        write_document(building / RECORD, exported.model_dump(mode="json"))
        for networks in open_ensemble_bundle(building, allow_code=True).members:
            networks.check()
    return exported


def is_ensemble_bundle(folder: Path) -> bool:
    """Whether an ensemble's folder is a bundle of it."""
    return (folder / _MEMBERS).is_dir()


def open_ensemble_bundle(folder: Path, *, allow_code: bool = False, held: int | None = None) -> EnsembleDetector:
    """Return the detector of a bundle; arguments as for ``detector_of``.

    Raises:
        UsageError: a file is missing, damaged or too many, or a member asks for code that is not allowed.
        DataError: the record is damaged.
    """
    there = {name for name in bundle_folder.files_in(folder) if not name.startswith(f"{_MEMBERS}/")}
    if (folder / RECORD).is_symlink() or (folder / RECORD).stat().st_size > bundle_folder.MOST_JSON_BYTES:
        raise bundle_folder.refused(
            folder, f"{RECORD} is a link, or larger than {bundle_folder.MOST_JSON_BYTES:,} bytes"
        )
    record = read_ensemble(folder)
    places = [f"{_MEMBERS}/{number}" for number in range(len(record.members))]
    wanted = {_CALIBRATION, _STANDING, CARD}
    if set(record.files) != {*wanted, *(f"{place}/{DIGESTS}" for place in places)} or there - {RECORD} != wanted:
        raise bundle_folder.refused(folder, f"{RECORD} names other files than an ensemble's, or there are others")
    if [member.path for member in record.members] != places or len(list((folder / _MEMBERS).iterdir())) != len(places):
        raise bundle_folder.refused(folder, f"{_MEMBERS}/ has not the members of {RECORD}")
    members = [BundleNetworks(folder / place, allow_code=allow_code, held=held) for place in places]
    for networks, member in zip(members, record.members, strict=True):
        learned = [networks.weights(fold) for fold in sorted(networks.folds)]
        if learned != member.weights or len(learned) != len(record.folds):
            raise bundle_folder.refused(folder, f"the weights of {member.run_id} are not those of the ensemble")
    try:
        standing = Standing.model_validate_json((folder / _STANDING).read_bytes())
    except ValidationError as error:
        raise bundle_folder.refused(folder, f"{_STANDING}: {error.errors()[0]['msg']}") from error
    calibration = bundle_folder.read_bundle_table(folder, _CALIBRATION, CALIBRATION)
    if calibration["label"].n_unique() < 2 or not set(calibration["fold"]) <= set(range(len(record.folds))):
        raise bundle_folder.refused(folder, f"{_CALIBRATION} has not both reals and fakes, or another fold")
    known = KnownVideos.of_tables(members[0].looks(), calibration, [rule.base_rate for rule in record.folds])
    cautions = [told for networks in members for told in networks.cautions()]
    lead, familiar = members[record.lead], Familiar(members[0].ranges())
    return EnsembleDetector(record, members, known, familiar, standing, cautions, lambda _: lead.features())
