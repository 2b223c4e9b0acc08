"""A headline names its protocol and its targets."""

from fvc_lib.analysis.read.headline import FORGERIES, protocol_cautions
from fvc_lib.analysis.read.runs import protocol_text
from fvc_lib.services.tables import RESULTS, frame_of

AT = {"all": (0.75, 0.5), "target:sora": (0.9, 0.5), "target:mora": (0.6, 0.7)}
ROWS = [
    (source, scope, "roc_auc", value, value - 0.05, value + 0.05, None, None, 40, 20)
    for scope, (model, control) in AT.items()
    for source, value in [("model", model), *((each, control) for each in FORGERIES.strict_controls)]
]
FOUND = frame_of(
    [row if row[0] != "shuffled_labels" else (*row[:3], 0.5, 0.45, 0.55, *row[6:]) for row in ROWS], RESULTS
)


def test_the_headline_names_the_protocol_and_its_targets() -> None:
    asked = {"protocol": "cross_corpus", "target_corpora": ["mora", "sora"]}
    assert protocol_text(asked) == "cross_corpus, tested on mora, sora"
    assert protocol_cautions(asked, FOUND, "roc_auc")[0].startswith(f"Protocol {protocol_text(asked)}: ")
    (told,) = protocol_cautions(asked, FOUND, "roc_auc")
    assert told.endswith("The number is the plain mean over 2 targets, the worst first: mora 0.600, sora 0.900.")
    assert protocol_text({}) == ""
    assert protocol_cautions({"protocol": "kfold"}, FOUND, "roc_auc") == ()
