"""Targets of a protocol: worst first, each judged beside its own controls."""

import polars as pl

from fvc_lib.analysis.figures.targets import target_matrix, target_table, targets_figure, targets_of
from fvc_lib.analysis.read.headline import FORGERIES
from fvc_lib.analysis.read.protocols import protocol_cautions, protocol_text
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import RESULTS, frame_of, write_table

AT = {"all": (0.75, 0.5), "target:sora": (0.9, 0.5), "target:mora": (0.6, 0.7)}
ROWS = [
    (source, scope, "roc_auc", value, value - 0.05, value + 0.05, None, None, 40, 20)
    for scope, (model, control) in AT.items()
    for source, value in [("model", model), *((each, control) for each in FORGERIES.strict_controls)]
]
FOUND = frame_of(
    [row if row[0] != "shuffled_labels" else (*row[:3], 0.5, 0.45, 0.55, *row[6:]) for row in ROWS], RESULTS
)


def test_targets_stand_worst_first_each_beside_its_own_controls() -> None:
    assert targets_of(FOUND) == ["mora", "sora"]
    table = target_table(FOUND)
    assert table["target"].to_list() == ["mora", "sora"]
    assert table["standing"].to_list() == ["not above control", "above control"]
    assert table["Model"].to_list() == ["0.600 [0.550, 0.650]", "0.900 [0.850, 0.950]"]
    figure = targets_figure(FOUND)
    assert "0.60 at mora, the worst" in figure.layout.title.text.replace("<br>", " ")
    assert [trace.x[0] for trace in figure.data] == [0.6, 0.7, 0.9, 0.5]


def test_a_run_without_targets_says_so_in_the_figure() -> None:
    none = FOUND.filter(pl.col("scope") == "all")
    assert targets_of(none) == []
    assert "nothing to show" in targets_figure(none).layout.title.text


def test_the_headline_names_the_protocol_and_its_targets() -> None:
    asked = {"protocol": "cross_corpus", "target_corpora": ["mora", "sora"]}
    assert protocol_text(asked) == "cross_corpus, tested on mora, sora"
    named = "cross_corpus, trained on pika, tested on mora, sora"
    assert protocol_text(asked, ["Mora", "pika", "sora"]) == named
    assert protocol_cautions(asked, FOUND, "roc_auc", ["Mora", "pika", "sora"])[0].startswith(f"Protocol {named}. ")
    (told,) = protocol_cautions(asked, FOUND, "roc_auc")
    assert told.endswith("The number is the plain mean over 2 targets, the worst first: mora 0.600, sora 0.900.")
    assert protocol_text({}) == ""
    assert protocol_cautions({"protocol": "kfold"}, FOUND, "roc_auc") == ()


def test_the_matrix_calls_targets_as_the_corpus_does_and_runs_by_what_tells_them_apart(run: RunPaths) -> None:
    named = FOUND.with_columns(pl.col("scope").replace({"target:sora": "target:open_sora_mb"}))
    write_table(named, RESULTS, run.results)
    matrix = target_matrix([run])
    assert matrix.frame.columns == ["trained", "run_id", "mora", "open_sora_mb"]
    html = matrix._repr_html_()
    assert ">open_sora_mb</th>" in html
    assert ">0.900 [0.850, 0.950]</td>" in html
    assert "frame_cnn" in matrix.frame["trained"][0]
