"""The model card of a run of task image or video_text: what it gives, what it was trained on, what its numbers are."""

import json
from collections.abc import Sequence

import polars as pl

from fvc_lib.services.config import RunConfig
from fvc_lib.services.parameters import run_config
from fvc_lib.services.registry import BACKBONES, DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import PARTS, TASK_RESULTS, read_table
from fvc_lib.services.tasks import TASKS

_WORST = 5
# In the card, or in no bundle because it names a place on a machine.
_SAID_ELSEWHERE = frozenset(
    {"task", "model", "model_weights", "backbone", "backbone_weights", "text_encoder", "num_frames", "fixed_size",
     "image_size"}
)  # fmt: skip
_MEANT = (
    "Meant for: pictures or videos like those below, by somebody who looks at the answers, and research. Not meant "
    "for: deciding about a person by them."
)


def task_card(run: RunPaths, sentences: Sequence[str], *, is_above_control: bool) -> str:
    """In the format of the Hugging Face hub: YAML between dashes, then Markdown.

    Args:
        run: finished.
        sentences: its standing and what to know beside it, without places of this machine.
        is_above_control: whether it is shown to be; else the YAML has no number, for which there is no control there.

    Raises:
        DataError: a table of the run is missing or damaged.
    """
    from fvc_lib.analysis.read.naming import corpus_text, model_name, run_parameters
    from fvc_lib.analysis.wording import clean_text, interval_text, metric_name, source_name, subject_name
    from fvc_lib.tasks.predicting import outcome_of, predictor_class

    config, outcome = run_config(run), outcome_of(run)
    is_image, network = config.task == "image", outcome.network
    asked = getattr(config, TASKS[config.task].network)
    own = None if BACKBONES.is_own(asked) else DETECTORS.file_of(asked)
    model = f"{own.name}:{asked.rpartition(':')[2]}" if own else model_name(run_parameters(run)) or asked
    corpus = clean_text(corpus_text(run) or "not recorded")
    files = predictor_class(config.task).files_of_run(run)
    results = read_table(run.task_results, TASK_RESULTS)
    numbers = results.filter(~pl.col("subject").str.starts_with("class:"), pl.col("value").is_not_null())
    numbers = numbers.sort("subject", "metric", pl.col("source") != "model", "source", maintain_order=True)
    front = [
        "library_name: fvc",
        f"pipeline_tag: {'image-classification' if is_image else 'video-text-to-text'}",
        "license: other",
        "license_name: see-below",
        f"tags: [{config.task.replace('_', '-')}]",
    ]
    subject, metric, _ = TASKS[config.task].headline[0]
    is_first = pl.col("subject").str.starts_with(subject) & pl.col("metric").str.starts_with(metric)
    first = numbers.filter(pl.col("source") == "model", is_first)
    if is_above_control and first.height:
        row, kind = first.row(0, named=True), "image-classification" if is_image else "video-text-to-text"
        named = f"type: {json.dumps(row['metric'])}, name: {json.dumps(metric_name(row['metric']))}"
        front += [
            "model-index:",
            f"- name: {json.dumps(model)}",
            "  results:",
            f"  - task: {{type: {kind}}}",
            f"    dataset: {{type: other, name: {json.dumps(corpus)}}}",
            f"    metrics: [{{{named}, value: {row['value']:.4f}}}]",
        ]
    counts = ", ".join(f"{files.filter(part=part)['content_sha256'].n_unique():,} {part}" for part in PARTS)
    spec = None if BACKBONES.is_own(asked) else DETECTORS.get(asked)
    licence = spec.licence if spec else "not stated" if ":" in asked else "this project's"
    told = f"Code of the network: {clean_text(licence)}."
    if network is not None and network.weights:
        told += f" Weights it began with: {clean_text(network.weights_licence or 'not stated')}."
    elif spec is not None and spec.brings_weights:
        told += f" Weights it began with: {clean_text(spec.weights_licence or 'not stated')}."
    trained = []
    if network is not None:
        trained = [f"{network.num_parameters:,} parameters were trained, {network.num_frozen:,} were not."]
        trained += [f"{note[0].upper()}{note[1:]}." for note in map(clean_text, network.notes)]
    lines = [
        "---", *front, "---", "",
        f"# {model}, trained for {'recognition of pictures' if is_image else 'captions and retrieval of videos'}", "",
        f"**{sentences[0]}**", "",
        *(f"- {sentence}" for sentence in sentences[1:]), "",
        "## Use", "",
        "```python", "from fvc_lib import load_detector", "",
        f'rows = load_detector("this folder").predict(["{"picture.jpg" if is_image else "video.mp4"}"])',
        "print(rows[0].values)", "```", "",
        _gives(config), "",
        _MEANT, "",
        "## Data", "",
        (f"{corpus}: {counts} files, in {files['group_id'].n_unique():,} groups of files that belong together, each on "
        "one side of the split. Its licence holds for models trained on it, too, where it says so."), "",
        "## How it was trained and measured", "",
        ("One split. The epoch was chosen on the validation part, and the test part was looked at once."
        + (" Probabilities were calibrated on the validation part." if is_image else "")), "",
        " ".join([*trained, _other_settings(config)]).strip(), "",
        "## Numbers", "",
        (f"Of the test part, with {100 * config.confidence:g} % intervals over groups. Rows that are not the model's "
        "are controls."), "",
        "| of | what | metric | value |", "|---|---|---|---|",
        *(
            f"| {source_name(row['source'])} | {clean_text(subject_name(row['subject']))} | "
            f"{metric_name(row['metric'])}{' in ' + clean_text(row['unit']) if row['unit'] else ''} | "
            f"{interval_text(row['value'], row['low'], row['high'])} |"
            for row in numbers.iter_rows(named=True)
        ), "",
        "## Where it fails", "",
        *_worst_classes(results), "",
        "## Limits", "",
        ("Files of the run are known again by their content alone, and answers on those that it was trained on show "
        "nothing. There is no 'undecided', and nothing says that a file is unlike those of the run. Numbers of one "
        "corpus say nothing of another."), "",
        "## Licences", "",
        told, "",
        f"Paper: {clean_text(spec.paper if spec else 'none')}. Run: {run.run_id}.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _gives(config: RunConfig) -> str:
    if config.task == "image":
        return (
            f"Of each picture ({config.image_size} x {config.image_size} pixels of its middle): a class with its "
            "probability and the second, and the numbers that `labels.json` names with their units, as far as it "
            "learned them."
        )
    clips, given = config.clips, []
    if config.caption_weight:
        given.append("a caption")
    if config.contrastive_weight:
        given.append("the nearest of the run's own texts (`texts.parquet`)")
    return (
        f"Of each video ({clips.num_frames} frames of {clips.side} x {clips.side} pixels, {clips.view.sampling}, "
        f"{clips.view.fit}): {' and '.join(given)}."
    )


def _other_settings(config: RunConfig) -> str:
    from fvc_lib.analysis.wording import clean_text

    values = config.values_of(lambda declared: declared.changes in ("weights", "results"))
    usual = {name: field.default for name, field in RunConfig.model_fields.items()}
    usual |= TASKS[config.task].defaults
    names = [name for name in values if name not in _SAID_ELSEWHERE and getattr(config, name) != usual[name]]
    return f"Otherwise than by default: {', '.join(f'{n} {clean_text(values[n])}' for n in names)}." if names else ""


def _worst_classes(results: pl.DataFrame) -> list[str]:
    """The classes with the lowest F1, with how many pictures they have."""
    from fvc_lib.analysis.wording import clean_text, number_text, subject_name

    known = results.filter(
        pl.col("subject").str.starts_with("class:"), pl.col("metric") == "f1", pl.col("value").is_not_null()
    )
    if known.is_empty():
        return ["Not measured: no part of the test part has numbers of its own."]
    return [
        "The classes with the lowest F1, on few pictures each:",
        "",
        *(
            f"- {clean_text(subject_name(row['subject']))}: {number_text(row['value'])} on {row['num_samples']:,} "
            "pictures of the test part"
            for row in known.sort("value", "subject").head(_WORST).iter_rows(named=True)
        ),
    ]
