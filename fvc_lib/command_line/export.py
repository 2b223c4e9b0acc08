"""``run_notebooks.py export``: a finished run's detector as a folder to hand on, with a model card from the record."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import polars as pl

from fvc_lib import CHECKOUT
from fvc_lib.command_line.models import standing_of, standing_of_task_run
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, UsageError
from fvc_lib.services.parameters import resolve_config, run_config
from fvc_lib.services.records.ensembles import find_run_or_ensemble, is_ensemble, members_of, read_ensemble
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tasks import DEFAULT_TASK, PROTOCOLS

if TYPE_CHECKING:
    from fvc_lib.analysis.read.headline import ReportHeadline
    from fvc_lib.services.registry import DetectorSpec

_WORST_SLICES = 5
# In the card, or in no bundle because it names a place on a machine.
_SAID_ELSEWHERE = frozenset(
    {"model", "model_weights", "crop", "head", "l2_normalise", "protocol", "target_corpora", "num_frames", "fixed_size"}
)


@click.command(short_help="Write a run's detector as a folder to hand on.")
@click.argument("run", default="latest")
@click.option(
    "--to", type=click.Path(path_type=Path), help="The folder to write, not there yet. Without: ./bundle_RUN."
)
@click.option("--format", "form", type=click.Choice(("onnx", "torch_export")),
              help="Write each network in this form as well, compared with it.")  # fmt: skip
@click.option("--final", is_flag=True, help="Write the run's one network of all groups (train_final), not the folds'.")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Runs folder, where it is not the default.")
def export(run: str, to: Path | None, form: str | None, final: bool, runs_dir: Path | None) -> None:
    """Write the detector that RUN has trained as a bundle: a folder that needs neither the run nor its corpus.

    RUN is 'latest', a run id, a part of one, or a run folder; its folds must all be trained and its results there. Or
    it is an ensemble: then a bundle of each of its runs lies in members/. Of a run of task image or video_text the
    bundle has its one network, what its outputs mean, and the run's texts with their embeddings.

    \b
    python run_notebooks.py export latest
    python run_notebooks.py export latest --to ~/detectors/mine
    python run_notebooks.py export latest --format onnx
    python -c "from fvc_lib import load_detector; print(load_detector('bundle_RUN').predict(['video.mp4']))"

    In it: the folds' networks (safetensors), how videos are decoded and scores calibrated, the out-of-fold scores, what
    the training videos were like and by which hashes they are known again, a model card (README.md), and a SHA-256 of
    every file, without which nothing is loaded. No video, no path and no name of one. A network of your own is copied
    as code, which whoever loads the bundle must allow. A run that is not above its controls is exported as well: the
    card and every loading say so first.

    With --format (tasks video and image) each network is there a second time as a file that needs neither this project
    nor its code: from pixels to logits, any number of clips or pictures at once. Each is loaded and compared with its
    network on the run's; where an output differs by more than 0.0001, or the network cannot be written so, nothing is
    written.

    Exit codes: 0 ok, 1 a file is damaged, 2 usage, 3 the results are missing or damaged.
    """  # noqa: D301 - click wants the backspace character itself before lines it shall not re-wrap
    found = find_run_or_ensemble(runs_dir or Path(resolve_config().runs_dir), run)
    target = (to or Path(f"bundle_{found.run_id}")).expanduser().absolute()
    if is_ensemble(found.root):
        if form or final:
            raise UsageError(f"--{'format' if form else 'final'}: is for runs. Export the ensemble's runs with it.")
        num_networks, sentences = write_ensemble(found, target)
    else:
        num_networks, sentences = write_run_bundle(found, target, form=form or "", final=final)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    click.echo(f"bundle {target}: {num_networks} network{'s' * (num_networks != 1)}, {size / 1e6:.1f} MB")
    for sentence in sentences:
        click.echo(f"  {sentence}")


def write_run_bundle(run: RunPaths, target: Path, *, form: str = "", final: bool = False) -> tuple[int, list[str]]:
    """Write the run's bundle with its model card; the number of networks, and sentences for the terminal.

    Raises:
        UsageError, FvcError, OSError: as ``write_bundle``.
        DataError: the run's results are missing or damaged.
    """
    from fvc_lib.analysis.read.headline import run_headline  # torch and polars take a second to load
    from fvc_lib.tasks.video.verdicts.bundle import write_bundle

    if run_config(run).task != DEFAULT_TASK:
        return _write_task_bundle(run, target, form=form, final=final)
    headline = _without_places(run_headline(run), run)
    if headline.notes:
        raise DataError(f"{run.run_id} is not exported: {' '.join(headline.notes)}")
    card = model_card(run, headline, final=final)
    record, told = write_bundle(run, target, standing_of(headline), card, form=form, final=final)
    return len(record.folds) if record.final is None else 1, [headline.verdict.sentence, *([told] if told else [])]


def _write_task_bundle(run: RunPaths, target: Path, *, form: str, final: bool) -> tuple[int, list[str]]:
    """As ``write_run_bundle``, of a task without verdicts."""
    from fvc_lib.analysis.read.headline import run_headline  # torch and polars take a second to load
    from fvc_lib.command_line.task_card import task_card
    from fvc_lib.tasks.predictor_bundle import write_predictor_bundle

    if final:
        task = run_config(run).task
        raise UsageError(f"--final: is for runs of task {DEFAULT_TASK}; {run.run_id} is of task {task}. Leave it out.")
    headline, standing = run_headline(run), standing_of_task_run(run)
    if headline.notes:
        raise DataError(f"{run.run_id} is not exported: {' '.join(headline.notes)}")
    standing = standing.model_copy(update={"sentences": [_without_place(each, run) for each in standing.sentences]})
    card = task_card(run, standing.sentences, is_above_control=standing.standing == "above control")
    told = write_predictor_bundle(run, target, standing, card, form=form)
    return 1, [*standing.sentences[:1], *([told] if told else [])]


def write_ensemble(ensemble: RunPaths, target: Path) -> tuple[int, list[str]]:
    """Write the bundle of an ensemble, with a bundle of each of its runs; returns as ``write_run_bundle``.

    Raises:
        UsageError, FvcError, OSError: as ``write_ensemble_bundle``.
        DataError: the results of the ensemble or of a run are missing or damaged.
    """
    from fvc_lib.analysis.read.headline import run_headline  # torch and polars take a second to load
    from fvc_lib.tasks.video.ensembles.bundle import write_ensemble_bundle

    record, parts = read_ensemble(ensemble.root), []
    for run in (ensemble, *members_of(ensemble.root, record)):
        headline = _without_places(run_headline(run), run)
        if headline.notes:
            raise DataError(f"{run.run_id} is not exported: {' '.join(headline.notes)}")
        parts.append((standing_of(headline), model_card(run, headline)))
    (standing, card), *members = parts
    write_ensemble_bundle(ensemble, target, standing, card, members)
    return len(record.members) * len(record.folds), standing.sentences[:1]


def _without_places(headline: "ReportHeadline", run: RunPaths) -> "ReportHeadline":
    verdict = replace(headline.verdict, sentence=_without_place(headline.verdict.sentence, run))
    return replace(headline, verdict=verdict, cautions=tuple(_without_place(each, run) for each in headline.cautions))


def _without_place(text: str, run: RunPaths) -> str:
    """Sentences name commands with the folders of this machine: in a bundle the run's id and the script's name do."""
    return text.replace(str(CHECKOUT / "run_notebooks.py"), "run_notebooks.py").replace(str(run.root), run.run_id)


def model_card(run: RunPaths, headline: "ReportHeadline", *, final: bool = False) -> str:
    """The run's model card in the format of the Hugging Face hub: YAML between dashes, then Markdown.

    With ``final`` that of its network of all groups; the numbers are the folds' and said to be.
    """
    from fvc_lib.analysis.read.headline import DISHONEST_CONTROLS
    from fvc_lib.analysis.wording import clean_text, interval_text, metric_name, source_name
    from fvc_lib.services.registry import DETECTORS
    from fvc_lib.services.tables import INDEX, RESULTS, SLICES, read_table
    from fvc_lib.tasks.video.verdicts.final import final_sentences, known_videos_of_final
    from fvc_lib.tasks.video.verdicts.rule import rule_of
    from fvc_lib.tasks.video.verdicts.unfamiliar import index_of_files

    config, index = run_config(run), read_table(run.index, INDEX)
    spec, codecs = DETECTORS.get(config.model), index_of_files(run)["codec"].unique()
    own = DETECTORS.file_of(config.model)
    model = config.model if own is None else f"{own.name}:{config.model.rpartition(':')[2]}"
    clips, together = config.clips, is_ensemble(run.root)
    if together:
        model, trained = _of_members(run)
    else:
        seen = (
            f"Clips: {clips.num_frames} frames of {clips.side} x {clips.side} pixels, {clips.view.sampling}, "
            f"{clips.view.crop or clips.view.fit}, {clips.view.clips} of a video."
        )
        if config.of_features == "forensic":
            seen = (
                f"Forensic features (families: {config.feature_families}), measured at native resolution on places "
                "spread over each video (docs/features.md); no clips. They say nothing of when or where."
            )
        trained = [_trained(run, config, spec), "", seen]
    names = ", ".join(clean_text(name) for name in sorted(index["corpus"].unique()))
    counts = {label: index.filter(label=label).height for label in ("real", "fake")}
    results = read_table(run.results, RESULTS) if run.results.is_file() else pl.DataFrame(schema=_RESULT_COLUMNS)
    overall = results.filter(pl.col("scope") == "all", pl.col("value").is_not_null())
    slices = read_table(run.slices, SLICES) if run.slices.is_file() else None
    above = headline.verdict.standing == "above control"
    auc = headline.model_score
    front = [
        "library_name: fvc",
        "pipeline_tag: video-classification",
        "license: other",
        "license_name: see-below",
        "tags: [deepfake-detection, video-forensics]",
    ]
    if above and auc is not None and not final:  # an index of numbers has no room for a control beside one
        front += [
            "model-index:",
            f"- name: {json.dumps(model)}",
            "  results:",
            "  - task: {type: video-classification, name: real or fake video}",
            f"    dataset: {{type: other, name: {json.dumps(names)}}}",
            f"    metrics: [{{type: roc_auc, name: ROC AUC of groups not trained on, value: {auc.value:.4f}}}]",
        ]
    licence = f"Code of the {'model' if config.of_features else 'network'}: {clean_text(spec.licence)}."
    if config.model_weights or spec.brings_weights:
        licence += f" Weights it began with: {clean_text(spec.weights_licence or 'not stated')}."
    paper = f"Paper: {clean_text(spec.paper)}. Run: {headline.run_id}."
    number_rows = [
        f"| {source_name(row['source'])} | {metric_name(row['metric'])} | "
        f"{interval_text(row['value'], row['low'], row['high'])} |"
        for row in overall.sort(pl.col("source") != "model", "source", "metric").iter_rows(named=True)
        if row["source"] == "model" or (row["metric"] == "roc_auc" and row["source"] not in DISHONEST_CONTROLS)
    ]
    networks, of_all = f"{config.num_trainings} networks{' of each member' * together}.", list[str]()
    chosen = "Epoch, temperature and threshold were chosen on inner validation videos."
    if config.of_features and not together:
        networks = f"{config.num_trainings} models on features, and no network."
        chosen = (
            "Their settings were chosen on inner folds of the training groups, temperature and threshold on inner "
            "validation videos."
        )
    if final:
        known = known_videos_of_final(run)
        networks = f"The numbers are of {config.num_trainings} networks, which are not here."
        of_all = ["## One network of all groups", "", " ".join(final_sentences(known, rule_of())), ""]
    lines = [
        "---", *front, "---", "",
        f"# {model}, trained to tell real videos from fake ones", "",
        f"**{headline.verdict.sentence}**", "",
        *(f"- {caution}" for caution in headline.cautions), "",
        *of_all,
        "## Use", "",
        "```python", "from fvc_lib import load_detector", "",
        'rows = load_detector("this folder").predict(["video.mp4"])', "```", "",
        ("Meant for: a first look at a video by somebody who then looks further, and research. Not meant for: deciding "
        "about a person or a publication by the score alone, or footage that is staged or out of context, which no "
        "pixels tell. The score is the probability of fake where fakes are as frequent as in the videos below."), "",
        "## Data", "",
        (f"{names}: {counts['real']:,} real and {counts['fake']:,} fake videos in {index['group_id'].n_unique():,} "
        "groups of videos that belong together. Its licence holds for models trained on it, too, where it says so."),
        "",
        (f"Codecs: {', '.join(sorted(map(clean_text, codecs)))}. What the videos are like otherwise: "
        "`training_ranges.json`; a video that is unlike them is one of which this model is not known to say anything."),
        "",
        "## How it was trained and measured", "",
        (f"Protocol {config.protocol}: {PROTOCOLS[config.protocol].meaning}. {networks} {chosen} "
        f"{headline.measure.circumstances(headline.num_samples, headline.num_groups)}"), "",
        *trained, "",
        "## Numbers", "",
        f"With {100 * config.confidence:g} % intervals over groups. Rows that are not the model's are controls.", "",
        "| of | metric | value |", "|---|---|---|", *number_rows, "",
        "## Where it fails", "",
        *_worst_slices(slices), "",
        "## Limits", "",
        ("Videos of the run are recognised by their bytes and have the score of the network that had not seen them; "
        "copies of them that look alike get no prediction. New generators, platforms and compressions lower the "
        "numbers, as a rule by much. Numbers of one corpus say nothing of another."), "",
        "## Licences", "",
        *(["Those of its members."] if together else [licence, "", paper]), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _of_members(ensemble: RunPaths) -> tuple[str, list[str]]:
    """What an ensemble is called, and a line on each of its runs."""
    from fvc_lib.analysis.wording import clean_text

    record = read_ensemble(ensemble.root)
    models = [clean_text(member.model) for member in record.members]
    lines = [
        f"- `members/{place}`: {models[place]}, seed {member.seed}, weight {record.weight_of_member(place):.3f}; where "
        "it stands by itself says its own README.md"
        for place, member in enumerate(record.members)
    ]
    return f"{record.method} of {' + '.join(dict.fromkeys(models))}", lines


def _trained(run: RunPaths, config: RunConfig, spec: "DetectorSpec") -> str:
    """Of the network what was trained, and how, as far as it was not as by default."""
    from fvc_lib.analysis.wording import clean_text
    from fvc_lib.engine.training_state import TrainingRecord
    from fvc_lib.tasks.recipe import read_outcome

    unit = " on features of length 1" if config.l2_normalise or spec.l2_normalise else ""
    said = [f"Head: {config.head or spec.head}{unit}."] if spec.build is None else []
    outcome = read_outcome(run.fold_outcome(0), TrainingRecord)
    if outcome is not None and outcome.network is not None:
        network = outcome.network
        said.append(f"{network.num_parameters:,} parameters were trained, {network.num_frozen:,} were not.")
        said += [f"{note[0].upper()}{note[1:]}." for note in map(clean_text, network.notes)]
    values, fields = (
        config.values_of(lambda declared: declared.changes in ("weights", "results")),
        RunConfig.model_fields,
    )
    names = [name for name in values if name not in _SAID_ELSEWHERE and getattr(config, name) != fields[name].default]
    other = [f"{name} {clean_text(values[name])}" for name in names]
    return " ".join([*said, *([f"Otherwise than by default: {', '.join(other)}."] if other else [])])


_RESULT_COLUMNS = {
    "source": pl.String, "scope": pl.String, "metric": pl.String, "value": pl.Float64, "low": pl.Float64,
    "high": pl.Float64,
}  # fmt: skip


def _worst_slices(slices: pl.DataFrame | None) -> Sequence[str]:
    """The slices with the lowest AUC, small ones said to be small."""
    from fvc_lib.analysis.wording import clean_text, interval_text

    if slices is None or (known := slices.filter(pl.col("metric") == "roc_auc").drop_nulls("number")).is_empty():
        return ["Not measured: no part of the videos has enough reals and fakes of its own."]
    rows = known.sort("is_small", "number").head(_WORST_SLICES).iter_rows(named=True)
    return [
        "The parts of the data with the lowest ROC AUC within folds:",
        "",
        *(
            f"- {clean_text(row['slice_by'])} {clean_text(row['value'])}: "
            f"{interval_text(row['number'], row['low'], row['high'])} on {row['num_videos']:,} videos of "
            f"{row['num_groups']:,} groups{', too few to say much' if row['is_small'] else ''}"
            for row in rows
        ),
    ]
