"""The protocols by which a corpus is divided into what trains and what tests, as plain data.

What each does with an index is in ``fvc_lib/corpus/protocols/``; the plan needs no more of them than how many trainings
they have, and shall not wait for tables to load.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fvc_lib.services.errors import did_you_mean

KFOLD, OFFICIAL, OFFICIAL_STRICT = "kfold", "official", "official_strict"
CROSS_CORPUS, LEAVE_ONE_GENERATOR_OUT = "cross_corpus", "leave_one_generator_out"
LENGTH_MATCHED, METADATA_MATCHED = "length_matched", "metadata_matched"


@dataclass(frozen=True)
class ProtocolSpec:
    """One way to divide a corpus: ``trains_once``, or one training per fold; ``meaning`` follows a colon."""

    name: str
    meaning: str
    trains_once: bool = False


PROTOCOLS: Mapping[str, ProtocolSpec] = {
    spec.name: spec
    for spec in (
        ProtocolSpec(KFOLD, "every group is tested once, by a model that has seen none of it"),
        ProtocolSpec(OFFICIAL, "trained, chosen and tested on the corpus's own parts, leaks and all", trains_once=True),
        ProtocolSpec(OFFICIAL_STRICT, "the same without the training videos whose groups are tested", trains_once=True),
        ProtocolSpec(CROSS_CORPUS, "trained on some corpora, tested on each of the others", trains_once=True),
        ProtocolSpec(
            LEAVE_ONE_GENERATOR_OUT, "each generator's fakes are tested by models that have seen none of that generator"
        ),
        ProtocolSpec(LENGTH_MATCHED, "folds of as many real as fake videos of each length"),
        ProtocolSpec(METADATA_MATCHED, "folds of as many real as fake videos of each codec, size and length"),
    )
}


def known_protocol(name: str) -> str:
    """``name``; ``ValueError`` with the nearest one where no protocol is called that."""
    if name not in PROTOCOLS:
        raise ValueError(f"input should be one of {', '.join(PROTOCOLS)}.{did_you_mean(name, PROTOCOLS)}")
    return name
