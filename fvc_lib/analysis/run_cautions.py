"""What a reader must know of a run besides its number: where it is from, how few groups it stands on, what leaked."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from fvc_lib.analysis.records import read_tables
from fvc_lib.analysis.wording import count_text
from fvc_lib.services.path_text import path_to_text
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import LEAKAGE_AUDIT

# Parameter, value, and what a reader of the number must then know.
_OF_PARAMETERS = (
    ("shuffle_labels", True, "Labels were shuffled by group on purpose: anything but chance would be a leak."),
)
_SYNTHETIC = {
    "video": "fakes in the world are told",
    "image": "dishes in the world are recognised",
    "video_text": "videos of the world are described",
}
_FEW_GROUPS = 100  # from here on intervals hold what they promise to within two or three in a hundred


def parameter_cautions(parameters: Mapping[str, object]) -> tuple[str, ...]:
    """What must be known because of how the run was asked for."""
    told = [sentence for name, value, sentence in _OF_PARAMETERS if parameters.get(name) == value]
    if parameters.get("corpus") == "":
        what = _SYNTHETIC.get(str(parameters.get("task")), _SYNTHETIC["video"])
        told.insert(0, f"The corpus is synthetic: the number shows that the pipeline works, not how well {what}.")
    kept = parameters.get("dev_samples_per_class")
    if isinstance(kept, int) and kept > 0:
        told.append(f"Trained in dev mode, on at most {count_text(kept, 'image')} of each class.")
    return tuple(told)


def interval_cautions(num_groups: int | None, low: float | None, high: float | None) -> tuple[str, ...]:
    """What must be known of a number's interval over groups; nothing where it may be taken as it stands.

    The shares are those of ``metrics.intervals.cluster_bootstrap``.
    """
    told = []
    if low is not None and low == high:
        told.append(
            "An interval without width is no certainty: no draw of these groups changes the number, others may."
        )
    if num_groups is not None and num_groups < _FEW_GROUPS:
        told.append(
            f"{count_text(num_groups, 'group')} {'is' if num_groups == 1 else 'are'} few, and intervals come out too "
            "narrow: simulated with groups of uneven sizes, those meant to hold the truth 95 times in 100 held it 88 "
            "times with 20 groups and 91 times with 40."
        )
    return tuple(told)


def audit_failures(run: RunPaths) -> list[str]:
    """The findings of the run's leakage audit that did not pass; none where no audit is recorded."""
    audit = read_tables([(path_to_text(run.run_id), run.leakage_audit)], LEAKAGE_AUDIT).frame
    return audit.filter(~pl.col("passed").fill_null(value=True))["finding"].to_list()
