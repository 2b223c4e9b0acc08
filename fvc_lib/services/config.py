"""One validated configuration for a whole run.

Precedence: defaults < params file < environment < command line. The field names are the parameter names of the
notebooks, so a value means the same in ``params/*.yaml``, behind ``-p`` and in a parameters cell.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from fvc_lib import CHECKOUT
from fvc_lib.services.atomic_files import sha256_of_json
from fvc_lib.services.errors import UsageError, did_you_mean

# ----------------------------------------------------------------------------------------------------
# What a field of the configuration means to one task, where its own description speaks of another's things.
#
# Fields are shared, and are described for the task video; a table of settings of a run with images should not speak of
# clips and folds.
#


_IMAGES, _PAIRS = "image", "video_text"


def _both(image: str, video_text: str) -> Mapping[str, str]:
    return {_IMAGES: image, _PAIRS: video_text}


def _same(text: str) -> Mapping[str, str]:
    return _both(text, text)


_MEANINGS: Mapping[str, Mapping[str, str]] = {
    "corpus": _both(
        "folder or manifest of images; empty: the generated pictures of dishes",
        "manifest of videos and texts, or a folder with one; empty: the generated clips with captions",
    ),
    "max_rejected_share": _both(
        "stop when more than this share of the listed images is unusable",
        "stop when more than this share of the listed videos is unusable",
    ),
    "near_duplicate_bits": _both(
        "pictures with hashes closer than this that look alike join groups; 0: off",
        "videos with perceptual hashes closer than this many of 64 bits join groups; 0: off",
    ),
    "split_validation_share": _same("share of the training groups that chooses the epoch"),
    "split_test_share": _same("share of the groups tested on, where the corpus has no split of its own"),
    "model": {_PAIRS: "network of the video encoder"},
    "epochs": _same("at most this many passes over the training part"),
    "batch_size": _both(
        "images in memory at once; 0: the safe default (8)", "pairs in memory at once; 0: the safe default (8)"
    ),
    "effective_batch_size": _both(
        "images per optimizer step, reached by accumulation", "pairs per optimizer step, reached by accumulation"
    ),
    "class_balance": {_IMAGES: "loss: weigh classes; sampler: draw them evenly; none"},
    "early_stopping_epochs": _same("stop after this many epochs without a better validation loss; 0: never"),
    "num_ranks": _same("processes, one per GPU where there are any, that share the training"),
    "max_nonfinite_steps": _same("so many steps with a NaN or infinite loss are skipped; one more stops the stage"),
    "micro_batch_recovery_steps": _both(
        "after an out-of-memory, double the images again after so many steps; 0: never",
        "after an out-of-memory, double the pairs again after so many steps; 0: never",
    ),
    "cache_dir": _both(
        "where what is known of each image is shared between runs", "where decoded clips are shared between runs"
    ),
}


def meaning_for(task: str, name: str) -> str | None:
    """What the field ``name`` means to ``task``; None where that is what its description says."""
    return _MEANINGS.get(name, {}).get(task)


# ----------------------------------------------------------------------------------------------------
# How values given as text become a field's own type.


def split_names(value: Any) -> Any:
    """``-p augmentations flip,noise`` means the same as a YAML list, also as one given as text: ``[flip, noise]``."""
    if isinstance(value, str):
        listed = value.strip()
        if listed.startswith("[") and listed.endswith("]"):
            listed = listed[1:-1]
        return tuple(name.strip(" '\"") for name in listed.split(",") if name.strip(" '\""))
    return tuple(value) if isinstance(value, list) else value


def split_numbers(value: Any) -> Any:
    """``-p recall_at 1,5,10`` and a YAML list mean the same."""
    names = split_names(value)
    return tuple(int(name) if isinstance(name, str) and name.isdecimal() else name for name in names)


# ----------------------------------------------------------------------------------------------------
# What image recognition (``task: image``) is asked beside what every task shares.


class ImageFields(BaseModel):
    """Fields that 10_image_recognition reads; ``RunConfig`` has them among its own."""

    # Images
    image_layout: Literal["auto", "food101", "nutrition5k", "combined", "folder", "manifest"] = Field(
        "auto", description="how the corpus of images is laid out; auto: by what lies in it"
    )
    image_size: int = Field(224, ge=16, le=2048, description="side in pixels of the square an image is brought to")
    targets: Annotated[tuple[str, ...], BeforeValidator(split_names)] = Field(
        (), description="numeric columns to predict beside the class; empty: all the corpus has; none: no regression"
    )
    dev_samples_per_class: int = Field(
        0, ge=0, description="dev mode: a seeded subset of so many training images per class; 0: all"
    )

    # Image model and loss
    backbone: str = Field(
        "small_resnet", description="small_resnet, or torchvision:NAME or timm:NAME where that package is installed"
    )
    backbone_weights: str = Field("", description="file of the backbone's weights; empty: from scratch")
    freeze_backbone_epochs: int = Field(0, ge=0, description="train only the heads for so many epochs first")
    unfreeze_stage_epochs: int = Field(
        0, ge=0, description="then free the backbone's stages one by one, the last first, each so long; 0: all at once"
    )
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="share of the class target spread over all classes")
    focal_gamma: float = Field(0.0, ge=0, le=5, description="weighs well-classified images down; 0: cross-entropy")
    regression_weight: float = Field(1.0, ge=0, description="of the regression loss beside the class loss's 1")
    mixup_alpha: float = Field(0.2, ge=0, description="Beta parameter of mixup; 0: off")
    cutmix_alpha: float = Field(1.0, ge=0, description="Beta parameter of cutmix; 0: off")
    mix_share: float = Field(0.3, ge=0, le=1, description="share of the training images mixed with another one")
    measure_fits: bool = Field(
        True, description="try out which batch sizes and resolutions fit this machine, in child processes"
    )


# ----------------------------------------------------------------------------------------------------
# What video-text training (``task: video_text``) is asked beside what every task shares.


class VideoTextFields(BaseModel):
    """Fields that 20_video_text reads; ``RunConfig`` has them among its own."""

    # Videos and texts
    manifest_separator: str = Field(",", min_length=1, description="between the manifest's columns; any text")
    max_text_tokens: int = Field(32, ge=4, le=512, description="longer texts are cut; beginning and end count")
    vocabulary_size: int = Field(2000, ge=300, description="most byte-pair tokens learned from the training texts")

    # Video-text model and losses
    text_encoder: str = Field("own", description="own: the small transformer; or the folder of a transformers model")
    embedding_size: int = Field(128, ge=8, description="numbers in the space that videos and texts share")
    text_width: int = Field(128, ge=16, description="numbers per token in the text transformer and the decoder")
    text_layers: int = Field(2, ge=1, description="layers of the text transformer, and of the decoder")
    text_heads: int = Field(4, ge=1, description="attention heads; divides text_width")
    contrastive_loss: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="softmax as in CLIP, or sigmoid with a bias as in SigLIP"
    )
    contrastive_weight: float = Field(1.0, ge=0, description="of the contrastive loss; 0: off")
    caption_weight: float = Field(1.0, ge=0, description="of the captioning loss; 0: no decoder")
    masked_weight: float = Field(0.0, ge=0, description="of masked modelling of the clip's features; 0: off")
    masked_share: float = Field(0.3, gt=0, lt=1, description="share of a clip's frames hidden in masked modelling")
    beam_width: int = Field(1, ge=1, le=32, description="captions are searched with so many beams; 1: greedily")

    # Retrieval
    recall_at: Annotated[tuple[int, ...], BeforeValidator(split_numbers)] = Field(
        (1, 5, 10), description="the k of recall@k"
    )
    retrieval_memory_mb: int = Field(64, ge=16, description="retrieval metrics take no more beyond the embeddings")


# ----------------------------------------------------------------------------------------------------
# Which task reads which field of a run's configuration; a field that is not named here is read by all three.


TASKS = ("video", "image", "video_text")

_READ_BY: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(ImageFields.model_fields, ("image",)),
    **dict.fromkeys(VideoTextFields.model_fields, ("video_text",)),
    **dict.fromkeys(
        (
            "annotations_only", "num_folds", "inner_validation_share", "augmentations_per_video", "augmentations",
            "augmentation_strength", "clip_source", "shuffle_labels", "shuffled_label_control",
        ),
        ("video",),
    ),
    **dict.fromkeys(("num_frames", "fixed_size", "model"), ("video", "video_text")),
    **dict.fromkeys(("split_validation_share", "split_test_share"), ("image", "video_text")),
    "class_balance": ("video", "image"),
}  # fmt: skip

_OF_ONE_TASK = frozenset({*ImageFields.model_fields, *VideoTextFields.model_fields})
_ONE_SPLIT = "A run of this task has one split; split_validation_share and split_test_share say how large its parts are"
_BY_LABEL = "Labels are shuffled where videos are told real from fake"
# What to do instead, by field and task.
_INSTEAD: Mapping[tuple[str, str], str] = {
    **dict.fromkeys(
        ((name, task) for name in ("num_folds", "inner_validation_share") for task in ("image", "video_text")),
        _ONE_SPLIT,
    ),
    **dict.fromkeys(
        ((name, task) for name in ("shuffle_labels", "shuffled_label_control") for task in ("image", "video_text")),
        _BY_LABEL,
    ),
    ("clip_source", "video_text"): "This task reads its clips from the store's files, with equal results",
    ("fixed_size", "image"): "The side of an image is image_size",
    ("image_size", "video"): "The side of a video's frames is fixed_size",
    ("image_size", "video_text"): "The side of a video's frames is fixed_size",
    ("model", "image"): "The network of this task is backbone",
    ("backbone", "video"): "The network of this task is model",
    ("backbone", "video_text"): "The network of this task is model",
}


def tasks_that_read(name: str) -> tuple[str, ...]:
    """The tasks of which some stage reads the field ``name``."""
    return _READ_BY.get(name, TASKS)


def read_by(task: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that ``task`` reads, in their order, but the fields of the tasks image and video_text last."""
    own = [name for name in names if task in tasks_that_read(name)]
    return sorted(own, key=lambda name: name in _OF_ONE_TASK)


def remedy(name: str, task: str) -> str:
    """What somebody who gave ``task`` the field ``name`` may have wanted, a sentence; empty: nothing is like it."""
    instead = _INSTEAD.get((name, task), "")
    return f"{instead}." if instead else ""


AugmentationName = Literal[
    "flip", "affine", "color", "noise", "blur", "cutout", "frame_drop", "frame_duplicate", "frame_reverse"
]
AUGMENTATIONS: tuple[AugmentationName, ...] = get_args(AugmentationName)
# Noise, blur, cutout, resampling and repeated frames imitate the very traces a fake leaves, and teach a forensic
# network to overlook them: with an earlier network the sample corpus's AUC fell from 0.97-0.99 (flips alone) to
# 0.73-0.91 (all nine operations).
DEFAULT_AUGMENTATIONS: tuple[AugmentationName, ...] = ("flip",)

# The only environment variables that change a run, and the field each one sets.
ENVIRONMENT = {
    "USE_MLOPS_PIPELINE": "use_mlops_pipeline",
    "FVC_FIXED_SIZE": "fixed_size",
    "FVC_DATA_DIR": "data_dir",
    "FVC_RUNS_DIR": "runs_dir",
    "FVC_CACHE_DIR": "cache_dir",
    "FVC_MEM_GB": "mem_gb",
    "FVC_TRACKER": "tracker",
}

# Where things lie and how much of the machine is used: none of it may change a number, so none of it is hashed.
NOT_HASHED = frozenset(
    {
        "corpus", "data_dir", "runs_dir", "cache_dir", "experiment", "probe_workers", "num_workers", "mem_gb",
        "use_mlops_pipeline", "clip_source", "gradient_checkpointing", "num_ranks", "profile_memory",
        "memory_preflight", "clear_cache_training_batches", "clear_cache_validation_batches",
        "micro_batch_recovery_steps", "replay_run", "checkpoint_minutes", "checkpoint_epochs",
        "keep_checkpoints", "max_nonfinite_steps", "tracker",
    }
)  # fmt: skip


# What a run may be resumed with although it was begun with something else: the effective batch keeps the result the
# same up to rounding, and a fold that ran out of memory, or lost its GPU, must be able to go on. Not the source of the
# clips: whether shards are written is decided in a stage that would be skipped as finished.
MAY_CHANGE_ON_RESUME = (NOT_HASHED - {"corpus", "experiment", "runs_dir", "clip_source"}) | {"batch_size", "device"}


def _beside_the_code(name: str) -> str:
    """A default folder in the checkout, from whatever folder a command or notebook is started."""
    base = CHECKOUT if (CHECKOUT / "run_notebooks.py").is_file() else Path.cwd()
    return str(base / name)


# What suits the other two tasks better than a field's own default; below a params file and everything else.
TASK_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "video": {},
    "image": {"effective_batch_size": 24, "learning_rate": 2e-3, "early_stopping_epochs": 0},
    "video_text": {"effective_batch_size": 32, "learning_rate": 1e-3, "epochs": 30, "early_stopping_epochs": 0},
}


# The notebooks of the other tasks; every other notebook works on the task video, or on a run of any task.
TASK_OF_STAGE = {"10_image_recognition": "image", "20_video_text": "video_text"}


class RunConfig(VideoTextFields, ImageFields, BaseModel):
    """Everything that is asked of a run. Unknown names are refused; defaults are the memory-conservative ones."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    task: Literal["video", "image", "video_text"] = Field(
        "video",
        description="real or fake videos; image classes with regression; videos and the texts that describe them",
    )

    experiment: str = Field("default", description="folder under the runs folder that groups runs")
    corpus: str = Field("", description="folder, CSV/Parquet manifest or FVC-2018 folder; empty: the sample corpus")
    seed: int = Field(0, ge=0, lt=2**31, description="the one seed every random choice is derived from")

    # Index
    probe_workers: int = Field(0, ge=0, description="files probed at once; 0: one per core")
    max_rejected_share: float = Field(
        0.5, ge=0, le=1, description="stop the run when more than this share of the listed videos is unusable"
    )
    near_duplicate_bits: int = Field(
        10, ge=0, le=32, description="perceptual hashes closer than this many of 64 bits join groups; 0: off"
    )

    annotations_only: bool = Field(
        False, description="index the label tables of a corpus whose videos are not here; only 01 can run"
    )

    # Folds
    num_folds: int = Field(5, ge=2, description="outer folds; every group is tested exactly once")
    inner_validation_share: float = Field(
        0.25, gt=0, lt=1, description="share of a fold's training groups that chooses epoch and threshold"
    )

    # The other tasks have one split instead of folds: the corpus's own, or one made of whole groups
    split_validation_share: float = Field(
        0.15, gt=0, lt=1, description="tasks image and video_text: share of the training groups that chooses the epoch"
    )
    split_test_share: float = Field(
        0.2, gt=0, lt=1, description="the same: share of the groups tested on, where the corpus has no split of its own"
    )

    # Decode
    num_frames: int = Field(6, ge=1, description="frames taken uniformly from each video")
    fixed_size: int = Field(112, ge=16, le=2048, description="side in pixels of the square each frame is fitted to")

    # Augmentation
    augmentations_per_video: int = Field(2, ge=0, description="augmented clips made of each training video")
    augmentations: Annotated[tuple[AugmentationName, ...], BeforeValidator(split_names)] = Field(
        DEFAULT_AUGMENTATIONS, description=f"operations a clip may receive, of {', '.join(AUGMENTATIONS)}"
    )
    augmentation_strength: float = Field(1.0, ge=0, le=3, description="scales every operation; 1 is moderate")
    clip_source: Literal["store", "shards"] = Field(
        "store", description="training reads clips from the store's files or from a few large shards; equal results"
    )

    # Training
    model: Literal["frame_cnn", "r2plus1d"] = Field("frame_cnn", description="network for the video task")
    epochs: int = Field(20, ge=1, description="at most this many passes over the training clips")
    batch_size: int = Field(0, ge=0, description="clips in memory at once; 0: the model's own safe default (1-8)")
    effective_batch_size: int = Field(16, ge=1, description="clips per optimizer step, reached by accumulation")
    learning_rate: float = Field(3e-3, gt=0, description="AdamW's peak rate after warm-up, before cosine decay")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's decoupled weight decay")
    warmup_share: float = Field(0.1, ge=0, lt=1, description="share of all steps spent warming up linearly")
    max_gradient_norm: float = Field(1.0, gt=0, description="gradients are clipped to this L2 norm")
    class_balance: Literal["loss", "sampler", "none"] = Field(
        "loss", description="weigh the loss by class, or draw classes evenly, or neither"
    )
    early_stopping_epochs: int = Field(
        6, ge=0, description="stop after this many epochs without a better inner validation loss; 0: never"
    )
    amp: Literal["auto", "off"] = Field("auto", description="mixed precision where the device has it")
    device: Literal["auto", "cuda", "mps", "cpu"] = Field("auto", description="auto: cuda, else mps, else cpu")
    num_workers: int = Field(0, ge=0, description="loader processes; the results do not depend on it")
    num_ranks: int = Field(
        1, ge=1, description="processes (one per GPU, where there are any) that share one fold's training"
    )
    max_nonfinite_steps: int = Field(
        5, ge=0, description="so many steps with a NaN or infinite loss are skipped; one more stops the fold"
    )
    shuffle_labels: bool = Field(
        False, description="train and test on labels shuffled by group: an honest pipeline then scores chance"
    )
    shuffled_label_control: bool = Field(
        True, description="train each fold a second time on shuffled labels and report it as a control"
    )

    # Memory; none of it changes a number beyond rounding
    memory_preflight: bool = Field(
        True, description="measure one step in a child process first and lower batch_size where the budget is too small"
    )
    micro_batch_recovery_steps: int = Field(
        0, ge=0, description="after an out-of-memory, double the micro-batch again after so many quiet steps; 0: never"
    )
    replay_run: str = Field(
        "", description="a run whose changes of the micro-batch are repeated, so that its numbers repeat to the bit"
    )
    gradient_checkpointing: bool = Field(
        False, description="keep fewer activations and compute them again in the backward pass: less memory, more time"
    )
    clear_cache_training_batches: int | None = Field(
        None, ge=0, description="give cached device memory back every so many batches; none: the device's policy"
    )
    clear_cache_validation_batches: int | None = Field(
        None, ge=0, description="the same in validation; none: the device's policy"
    )
    profile_memory: bool = Field(
        False, description="record every allocation of the training: torch's snapshot on CUDA, memray on the CPU"
    )

    # Checkpoints
    checkpoint_minutes: float = Field(2.0, ge=0, description="at most this long between checkpoints within an epoch")
    checkpoint_epochs: int = Field(1, ge=1, description="checkpoint at the end of every so many epochs")
    keep_checkpoints: int = Field(2, ge=1, description="epoch checkpoints that stay beside the best and the latest")

    # Results
    bootstrap_replicates: int = Field(2000, ge=100, description="cluster bootstrap replicates over groups")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="coverage of every interval")

    tracker: Literal["none", "mlflow"] = Field(
        "none", description="mlflow: export each run when it ends, to MLFLOW_TRACKING_URI or mlflow.db in runs_dir"
    )

    # Where and how; never part of the hash
    data_dir: str = Field(_beside_the_code("data"), description="where the sample corpus is generated")
    runs_dir: str = Field(_beside_the_code("runs"), description="where run folders are written")
    cache_dir: str = Field(
        _beside_the_code("cache"), description="where decoded and augmented clips are shared between runs"
    )
    mem_gb: float | None = Field(None, gt=0, description="memory budget in GB; none: the machine's or job's limit")
    use_mlops_pipeline: bool = Field(
        True, description="stages as a DAG with skipping and resume; false: straight through in number order"
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_names(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name in values:
                if name not in cls.model_fields:
                    known = ", ".join(cls.model_fields)
                    raise UsageError(
                        f"unknown parameter {name!r}.{did_you_mean(str(name), cls.model_fields)} Known: {known}."
                    )
        return values

    @property
    def config_hash(self) -> str:
        """Hex SHA-256 over the fields that can change a number: equal on any machine for the same experiment."""
        return sha256_of_json({k: v for k, v in self.relevant().items() if k not in NOT_HASHED})

    def relevant(self) -> dict[str, Any]:
        """The fields that this task reads as JSON values; what is its own last."""
        values = self.model_dump(mode="json")
        return {name: values[name] for name in read_by(self.task, values)}

    def meaning(self, name: str) -> str:
        """What the field ``name`` means to this run's task, one line."""
        return meaning_for(self.task, name) or type(self).model_fields[name].description or ""

    def to_yaml(self) -> str:
        """The resolved parameters as YAML in field order, each with its description as a comment."""
        lines = []
        for name, value in self.relevant().items():
            description = self.meaning(name)
            text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").rstrip()
            lines.append(f"{name}: {text}  # {description}")
        return "\n".join(lines) + "\n"


def read_params_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML params file.

    Raises:
        UsageError: missing or unreadable file, bad YAML, or a document that is no mapping of names to values.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"params file {str(path)!r}: {error.strerror}. Give an existing YAML file.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"params file {str(path)!r} is not valid YAML: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UsageError(f"params file {str(path)!r}: got a {type(document).__name__}, wanted lines like 'epochs: 20'.")
    return document


def environment_values(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The documented variables that are set and not empty, by field name."""
    environ = os.environ if environ is None else environ
    return {field: environ[name] for name, field in ENVIRONMENT.items() if environ.get(name)}


def parse_text_value(name: str, text: str) -> Any:
    """A value given as text (command line or environment), typed as the field ``name`` says.

    Raises:
        UsageError: unknown name (with a suggestion) or a text that is not of the field's type.
    """
    if name not in RunConfig.model_fields:
        known = ", ".join(RunConfig.model_fields)
        raise UsageError(f"unknown parameter {name!r}.{did_you_mean(name, RunConfig.model_fields)} Known: {known}.")
    if text.strip().lower() in {"none", "null"} and RunConfig.model_fields[name].default is None:
        return None
    return getattr(_validated({name: text}, f"value for {name}"), name)


def resolve_config(
    params: Mapping[str, Any] | None = None,
    *,
    command_line: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> RunConfig:
    """Merge the sources by precedence (defaults < params file < environment < command line) and validate.

    Raises:
        UsageError: an unknown name or a value out of range; the message names the field and what is allowed.
    """
    merged: dict[str, Any] = dict(params or {})
    _validated(merged, "params file")  # so that a bad file is named even where the environment would hide it
    merged.update({k: parse_text_value(k, v) for k, v in environment_values(environ).items()})
    merged.update(command_line or {})
    return _validated({**task_defaults(merged.get("task")), **merged}, "parameters")


def refuse_fields_of_another_task(config: RunConfig, given: Iterable[str]) -> None:
    """Check that ``config.task`` reads the fields named in ``given``, or that they say nothing but the default.

    Raises:
        UsageError: one would be set and change nothing; the message says whose it is and what to give instead.
    """
    foreign = [name for name in sorted(given) if config.task not in tasks_that_read(name) and _is_set(config, name)]
    if not foreign:
        return
    owners = dict.fromkeys(tasks_that_read(name) for name in foreign)
    told = [
        f"{', '.join(name for name in foreign if tasks_that_read(name) == tasks)}: read by task "
        f"{' and '.join(tasks)} alone, and this run's task is {config.task}."
        for tasks in owners
    ]
    told += dict.fromkeys(text for name in foreign if (text := remedy(name, config.task)))
    others = dict.fromkeys(task for tasks in owners for task in tasks)
    choice = " or ".join(f"-p task {task}" for task in others)
    raise UsageError(
        f"{' '.join(told)} Leave {'them' if len(foreign) > 1 else 'it'} out, or begin a run with {choice}."
    )


def _is_set(config: RunConfig, name: str) -> bool:
    default = RunConfig.model_fields[name].default
    return bool(getattr(config, name) != task_defaults(config.task).get(name, default))


def task_defaults(task: Any) -> Mapping[str, Any]:
    """What differs from the fields' own defaults for ``task``; nothing for one that is not known."""
    return TASK_DEFAULTS.get(task, {}) if isinstance(task, str) else {}


def _validated(values: Mapping[str, Any], origin: str) -> RunConfig:
    try:
        return RunConfig(**{str(k): v for k, v in values.items()})
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in item['loc'])}: got {item['input']!r}, {item['msg'].lower()}"
            for item in error.errors()
        )
        raise UsageError(f"{origin}: {problems}.") from error
