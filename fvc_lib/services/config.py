"""The validated configuration of a run.

A field of the configuration is a parameter of notebooks. It has the same name and meaning in a file ``params/*.yaml``,
in the option ``-p NAME VALUE`` of a command, and in the parameters cell of a notebook.

The function ``field`` declares a field: its default, its meaning, the tasks and stages that read it, and what its value
may change, such as the trained weights. The declarations decide which values enter the hash of a run, and which values
a checkpoint must share. They also decide with which values a run may be resumed, or forked (copied into a new run).
"""

from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator

from fvc_lib.services.atomic_files import content_digest, sha256_of_json
from fvc_lib.services.config_fields import (
    TRAINED,
    TUNE,
    TUNE_WORDS,
    Declaration,
    NameIn,
    field,
    known_families,
    known_operating_point,
    matching,
    one_of,
    split_names,
    split_pairs,
    wanted,
)
from fvc_lib.services.errors import UsageError, command_text, did_you_mean
from fvc_lib.services.registry import AUGMENTATIONS, BACKBONES, CROPS, DETECTORS, SAMPLING, ClipSettings
from fvc_lib.services.run_paths import beside_the_code
from fvc_lib.services.tasks import (
    AUGMENTATION,
    DATA_INDEX,
    DEFAULT_TASK,
    FINAL_TRAINING,
    FOLD_ASSIGNMENT,
    FOLD_TRAINING,
    FORENSIC_FEATURES,
    KFOLD,
    KFOLD_RESULTS,
    PROTOCOLS,
    TASKS,
    Stage,
)

_VIDEO = ("video",)
_IMAGE = ("image",)
_PAIRS = ("video_text",)
_CLIPS, _LABELLED = ("video", "video_text"), ("video", "image")
_TRAINS = (FOLD_TRAINING, FINAL_TRAINING)
_EVEN_ROWS = wanted(lambda rows: rows % 2 == 0 and rows not in range(1, 16), "0, or an even number from 16 on")
Names = Annotated[tuple[str, ...], BeforeValidator(split_names)]
# By name, so that a family which is added later changes no run and trains nothing again.
FAMILIES = (
    "block_dct,codec_motion,double_compression,noise_residual,packets,quantisers,repeats,sharpness,spectrum,timing"
)
CROP_MARGIN = 0.3  # share by which the side of a crop grows
# Fields whose value 0 or empty stands for the model's own value.
OF_MODEL = ("num_frames", "fixed_size", "frame_sampling", "head", "tune", "batch_size")
# Generated videos had 8 frames a second, filmed ones 25 to 30. A faster common rate repeats frames of the slow videos,
# which gives the label away: metadata alone reached AUC 0.98 at 25 a second, 0.94 at 10, and 0.51 at 8.
RESCALE_RATE = 8  # frames a second that ``rescale`` gives


class RunConfig(BaseModel):
    """The parameters of a run. Unknown names are refused. The defaults need little memory."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    task: Annotated[str, one_of(TASKS)] = field(
        DEFAULT_TASK, "data", "real or fake videos; image classes and numbers; or videos and texts that describe them"
    )
    experiment: str = field("default", "folder", "folder under the runs folder that groups runs")
    # Not hashed: the fingerprint of the first stage counts the listed files, wherever they lie.
    corpus: str = field(
        "", "data", "folder, manifest, tar or pattern of tars; empty: the sample corpus", hashed=False, path=True
    )
    more_corpora: Names = field(
        (), "data", "further corpora, indexed together with it: A,B", _VIDEO, hashed=False, path=True
    )
    allow_outside: bool = field(False, "data", "read listed files outside the corpus folder, and follow links")
    label_map: Annotated[dict[str, Literal["real", "fake"]], BeforeValidator(split_pairs)] = field(
        {}, "data", "meaning of a manifest's labels other than real and fake: 1=fake,0=real", _VIDEO
    )
    columns: Annotated[dict[str, str], BeforeValidator(split_pairs)] = field(
        {}, "data", "columns of a manifest with other headers: path=file,label=target,group=subject", _VIDEO, neutral={}
    )
    case_score: Literal["mean", "max"] = field(
        "mean", "results", "score of a manifest's case from its videos' logits: mean, or max", _VIDEO, neutral="mean"
    )
    seed: int = field(
        0, "weights", "every random choice follows from it", stages=(DATA_INDEX, FOLD_ASSIGNMENT, KFOLD_RESULTS),
        ge=0, lt=2**31,
    )  # fmt: skip
    workers: int = field(
        0, "nothing", "processes that probe, decode or measure at once; 0: one per core, as memory allows", ge=0
    )

    # Index
    max_rejected_share: float = field(
        0.5, "results", "stop if more than this share of the listed files is unusable", stages=(DATA_INDEX,), ge=0, le=1
    )
    near_duplicate_bits: int = field(
        10, "data", "perceptual hashes closer than this many of 64 bits join groups; 0: off", ge=0, le=32
    )
    annotations_only: bool = field(
        False, "results", "index the label tables of a corpus whose videos are absent; only 01 can run", _VIDEO,
        stages=(DATA_INDEX,),
    )  # fmt: skip
    dev_groups: int = field(
        0, "data", "trial on this many groups, drawn by seed, which claims nothing; 0: all", _VIDEO, neutral=0, ge=0
    )
    canonical: bool = field(
        False, "data", "re-encode every video by one recipe before it is decoded or measured", _VIDEO, neutral=False
    )
    rescale: Annotated[int, _EVEN_ROWS] = field(
        0, "data", "bring every video to this many rows and 8 frames a second first; 0: off", _VIDEO, neutral=0,
        ge=0, le=2160,
    )  # fmt: skip

    # Which videos train and which test
    protocol: Annotated[str, one_of(PROTOCOLS)] = field(
        KFOLD, "weights", f"which videos train and which test: {', '.join(PROTOCOLS)}", _VIDEO, neutral=KFOLD,
        stages=(FOLD_ASSIGNMENT, KFOLD_RESULTS),
    )  # fmt: skip
    target_corpora: Names = field(
        (), "weights", "names of the corpora that cross_corpus tests on; it trains on the others", _VIDEO, neutral=(),
        stages=(FOLD_ASSIGNMENT,),
    )  # fmt: skip
    source_column: str = field(
        "corpus", "weights", "column of the index or manifest that names each video's source, for leave_one_source_out",
        _VIDEO, neutral="corpus", stages=(FOLD_ASSIGNMENT,),
    )  # fmt: skip
    num_folds: int = field(
        5, "weights", "outer folds; each group is tested once", _VIDEO, stages=(FOLD_ASSIGNMENT, KFOLD_RESULTS), ge=2
    )
    folds_seed: int | None = field(
        None, "weights", "seed of the folds, so that runs with other seeds share them; none: seed", _VIDEO,
        neutral=None, stages=(FOLD_ASSIGNMENT,), ge=0,
    )  # fmt: skip
    inner_validation_share: float = field(
        0.0, "weights", "0: all training groups train, for all epochs, and again in halves to calibrate: twice the "
        "time; else the share of them held back to choose epoch and threshold", _VIDEO,
        stages=(FOLD_ASSIGNMENT,), ge=0, lt=1,
    )  # fmt: skip

    # Decode
    num_frames: int = field(
        0, "weights", "frames taken from each video; 0: the model's number", _CLIPS, stages=(AUGMENTATION,), ge=0
    )
    fixed_size: Annotated[int, wanted(lambda side: side not in range(1, 16), "0, or a number from 16 on")] = field(
        0, "weights", "side in pixels of the square frames are fitted to; 0: the model's", _CLIPS,
        stages=(AUGMENTATION,), variable="FVC_FIXED_SIZE", ge=0, le=2048,
    )  # fmt: skip
    frame_sampling: Annotated[str, matching(f"|{SAMPLING}", "uniform, window:STRIDE (window:4) or rate:R")] = field(
        "", "weights", "uniform: over the video; window:STRIDE: neighbours; rate:R: R a second; empty: the model's",
        _CLIPS, neutral="", stages=(AUGMENTATION,),
    )  # fmt: skip
    clips_per_video: int = field(
        1, "weights", "clips of one video: training draws one, test averages their logits", _VIDEO, neutral=1,
        stages=(AUGMENTATION,), ge=1, le=64,
    )  # fmt: skip
    crop: Annotated[str, NameIn(CROPS, or_else="")] = field(
        "", "weights", "crop of each clip: face (extra faces), or my_crop.py:function; empty: none", _VIDEO,
        neutral="", stages=(AUGMENTATION,),
    )  # fmt: skip

    # Augmentation
    augmentations_per_video: int = field(
        2, "weights", "augmented clips of each training video of a network", _VIDEO, stages=(AUGMENTATION,), ge=0,
        lt=1000,
    )  # fmt: skip
    # Noise, blur, cutout, resampling and repeated frames imitate the traces of fakes. With all nine operations an
    # earlier network's AUC on the sample corpus fell from 0.97-0.99 to 0.73-0.91.
    augmentations: Annotated[Names, NameIn(AUGMENTATIONS)] = field(
        ("flip",), "weights", "operations a clip may receive: flip, affine, noise ...", _VIDEO, stages=(AUGMENTATION,)
    )
    self_blended: int = field(
        0, "weights", "pseudo-fakes of each training real, whose face is blended with itself (extra faces)", _VIDEO,
        neutral=0, stages=(AUGMENTATION,), ge=0,
    )  # fmt: skip
    wavelet_bands: float = field(
        0.0, "weights", "chance that a fake takes wavelet bands of its real, in training (WaveRep: 0.1); 0: off",
        _VIDEO, neutral=0.0, ge=0, le=1,
    )  # fmt: skip
    # On resume, the stage that writes shards is skipped if it has finished. So another value needs a fork (a new run).
    clip_source: Literal["store", "shards"] = field(
        "store", "weights", "store: a file per clip; shards: tar files, which WebDataset reads too",
        _CLIPS, neutral="store", stages=(AUGMENTATION,),
    )  # fmt: skip

    # Forensic features
    forensic_features: bool = field(False, "nothing", "measure forensic features for any model", _VIDEO)
    feature_families: Annotated[str, AfterValidator(known_families)] = field(
        FAMILIES, "weights", "families of forensic features that are measured, or all: A,B", _VIDEO, neutral=FAMILIES,
        stages=(FORENSIC_FEATURES,),
    )  # fmt: skip
    views: Annotated[str, matching("frames(,pixels)?(,coding)?", "frames, then pixels or coding or both")] = field(
        "frames,pixels,coding", "weights", "features a probe sees: of a trunk, and forensic ones of pixels and coding",
        _VIDEO, neutral="frames,pixels,coding",
    )  # fmt: skip

    # Training
    model: Annotated[str, NameIn(DETECTORS)] = field(
        "probe:efficientnet_lite0", "weights", "detector of videos: net.py:Net, or a name in the list of fvc detectors",
        _CLIPS, stages=(AUGMENTATION,),
    )  # fmt: skip
    model_weights: str = field(
        "", "weights", "file or folder of published weights; empty: the model's own, or none", _CLIPS,
        neutral="", path=True, content=True,
    )  # fmt: skip
    head: Literal["", "mean", "attention", "gru", "path"] = field(
        "", "weights", "mean, attention, gru or path; empty: the model's", _VIDEO, neutral=""
    )
    l2_normalise: bool = field(False, "weights", "bring each feature vector to length 1", _VIDEO, neutral=False)
    tune: Annotated[str, matching(f"|{TUNE}", TUNE_WORDS)] = field(
        "", "weights", "trained parts: head, norms, last:N, effort or all; empty: the model's", _VIDEO, neutral=""
    )
    epochs: int = field(20, "weights", "passes over the training part; at most, if an epoch is chosen", ge=1)
    batch_size: int = field(0, "rounding", "samples in memory at once; 0: the network's default", ge=0, hashed=True)
    effective_batch_size: int = field(16, "weights", "samples per optimizer step, reached by accumulation", ge=1)
    learning_rate: float = field(0.003, "weights", "AdamW's peak rate after warm-up, before cosine decay", gt=0)
    weight_decay: float = field(0.01, "weights", "AdamW's decoupled weight decay", ge=0)
    warmup_share: float = field(0.1, "weights", "share of all steps spent warming up linearly", ge=0, lt=1)
    class_balance: Literal["loss", "none"] = field("loss", "weights", "loss: weigh classes; none", _LABELLED)
    early_stopping_epochs: int = field(
        6, "weights", "stop after this many epochs without a better validation loss, where there is one; 0: never", ge=0
    )
    amp: Literal["auto", "off"] = field("auto", "weights", "mixed precision where the device has it")
    device: Literal["auto", "cuda", "mps", "cpu"] = field(
        "auto", "rounding", "auto: cuda, else mps, else cpu", hashed=True
    )
    num_workers: int = field(0, "nothing", "loader processes, as cores and memory allow; 0: none", ge=0)
    num_ranks: int = field(1, "rounding", "processes, one per GPU, that share a training", ge=1)
    label_smoothing: float = field(
        0.0, "weights", "share of the class target spread over all classes", _LABELLED, neutral=0.0, ge=0, lt=1
    )
    mixup_alpha: float = field(0.0, "weights", "Beta parameter of mixup; 0: off", _LABELLED, neutral=0.0, ge=0)
    cutmix_alpha: float = field(0.0, "weights", "Beta parameter of cutmix; 0: off", _LABELLED, neutral=0.0, ge=0)
    freeze_backbone_epochs: int = field(
        0,
        "weights",
        "epochs at the beginning that train only the layers above the backbone",
        _LABELLED,
        neutral=0,
        ge=0,
    )
    unfreeze_stage_epochs: int = field(
        0, "weights", "then epochs until the next stage trains, last first; 0: all at once", _LABELLED, neutral=0, ge=0
    )
    shuffle_labels: bool = field(
        False, "weights", "shuffle labels by group: an honest pipeline scores chance", _VIDEO, stages=(KFOLD_RESULTS,)
    )
    shuffled_label_control: bool = field(
        True, "results", "train each fold again on shuffled labels, as a control", _VIDEO, stages=_TRAINS
    )
    real_source_control: bool = field(
        True, "results", "train each fold again to tell two sources of reals apart, as a floor", _VIDEO, neutral=True,
        stages=_TRAINS,
    )  # fmt: skip
    train_final: bool = field(
        False, "nothing", "train one network more, on all groups, for verdicts; it has no number of its own", _VIDEO
    )
    operating_point: Annotated[str, AfterValidator(known_operating_point)] = field(
        "best", "results", "threshold: best (balanced accuracy), fpr=0.01 or cost=FALSE_ALARM:MISS", _VIDEO,
        neutral="best", stages=_TRAINS,
    )  # fmt: skip

    # Memory; it changes numbers by rounding alone
    memory_preflight: bool = field(True, "rounding", "measure one step first, and lower batch_size to fit the memory")
    gradient_checkpointing: bool = field(
        False, "rounding", "compute activations again in the backward pass: less memory"
    )

    # Checkpoints
    checkpoint_minutes: float = field(2.0, "nothing", "at most this long between checkpoints within an epoch", ge=0)

    # Results
    bootstrap_replicates: int = field(2000, "results", "random half-samples of the groups, for intervals", ge=100)
    confidence: float = field(0.95, "results", "coverage of every interval", gt=0.5, lt=1)
    tracker: Literal["none", "mlflow"] = field(
        "none", "nothing", "mlflow: export to MLFLOW_TRACKING_URI or mlflow.db in runs_dir", variable="FVC_TRACKER"
    )

    # Where and how
    data_dir: str = field(
        beside_the_code("data"), "nothing", "where the sample corpus is generated", variable="FVC_DATA_DIR", path=True
    )
    runs_dir: str = field(
        beside_the_code("runs"), "folder", "where run folders are written", variable="FVC_RUNS_DIR", path=True
    )
    cache_dir: str = field(
        beside_the_code("cache"), "nothing", "samples and probes that runs share", variable="FVC_CACHE_DIR", path=True
    )
    mem_gb: float | None = field(None, "nothing", "budget in GB; none: the machine's", gt=0, variable="FVC_MEM_GB")
    use_mlops_pipeline: bool = field(
        True, "nothing", "skip and resume stages as a DAG; false: run all in order", variable="USE_MLOPS_PIPELINE"
    )

    # Images
    image_size: int = field(224, "weights", "side in pixels of an image", _IMAGE, ge=16, le=2048)
    targets: Names = field(
        (), "weights", "numeric columns to predict next to the class; empty: all; none: no regression", _IMAGE
    )
    backbone: Annotated[str, NameIn(BACKBONES)] = field(
        "small_resnet", "weights", "small_resnet, torchvision:NAME, or a network on frames: timm:NAME ...", _IMAGE
    )
    backbone_weights: str = field(
        "", "weights", "file of the backbone's weights; empty: from scratch", _IMAGE, path=True
    )

    # Videos and texts
    manifest_separator: str = field(",", "data", "between the manifest's columns; any text", _PAIRS, min_length=1)
    max_text_tokens: int = field(32, "weights", "longer texts are cut; beginning and end count", _PAIRS, ge=4, le=512)
    vocabulary_size: int = field(
        2000, "weights", "most byte-pair tokens learned from the training texts", _PAIRS, ge=300
    )
    text_encoder: str = field("own", "weights", "own: a small transformer; or a transformers model's folder", _PAIRS)
    embedding_size: int = field(128, "weights", "numbers in the space that videos and texts share", _PAIRS, ge=8)
    contrastive_loss: Literal["softmax", "sigmoid"] = field(
        "softmax", "weights", "softmax as in CLIP, or sigmoid with a bias as in SigLIP", _PAIRS
    )
    # A loss without weight builds no network.
    contrastive_weight: float = field(1.0, "weights", "of the contrastive loss; 0: off", _PAIRS, ge=0)
    caption_weight: float = field(1.0, "weights", "of the captioning loss; 0: no decoder", _PAIRS, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_names(cls, values: Any) -> Any:
        for name in values if isinstance(values, dict) else ():
            require_known(str(name))
        return values

    @property
    def num_trainings(self) -> int:
        """Return the number of networks that the run trains: 1 or ``num_folds``.

        It depends on the protocol, the rule that divides the videos into training and test parts.
        """
        return 1 if PROTOCOLS[self.protocol].trains_once else self.num_folds

    @property
    def clips(self) -> ClipSettings:
        """Return the number and size of a clip's frames, and the view (the rule that cuts clips from a video).

        Where a field of the configuration is 0 or empty, the model's value is used. The model's file is imported.
        """
        of_videos = self.task == DEFAULT_TASK
        seen: dict[str, Any] = {"clips": self.clips_per_video, "crop": self.crop} if of_videos else {}
        seen["margin"] = CROP_MARGIN if seen.get("crop") else 0.0
        return DETECTORS.get(self.model).clips(self.num_frames, self.fixed_size, self.frame_sampling, **seen)

    def effective_values(self) -> dict[str, Any]:
        """Return the JSON values of all fields by name, with the model's values in place of 0 and empty.

        The model's file is imported, unless it is a user's file: then the values of the fields are returned.
        """
        values = self.model_dump(mode="json")
        if self.task not in DECLARED["num_frames"].tasks or DETECTORS.file_of(self.model) is not None:
            return values
        clips = self.clips
        spec = DETECTORS.get(self.model)
        seen = (clips.num_frames, clips.side, clips.view.sampling, spec.head, spec.tune, spec.micro_batch)
        of_model = dict(zip(OF_MODEL, seen, strict=True))
        return values | {name: values[name] or value for name, value in of_model.items()}

    @property
    def of_features(self) -> str:
        """Return the kind of features that the model takes; empty if it takes clips.

        ``forensic``: features measured by stage 03b. ``embedding``: features that a frozen trunk computes from clips.
        ``both``: both kinds, for a probe whose field ``views`` names more than ``frames``.
        """
        kind = DETECTORS.of_features(self.model) if self.task == DEFAULT_TASK else ""
        return "embedding" if kind == "both" and self.views == "frames" else kind

    @property
    def num_copies(self) -> int:
        """Return the number of augmented clips of each training video; 0 for a model on features."""
        return 0 if self.of_features else self.augmentations_per_video

    @property
    def cross_fits(self) -> bool:
        """Whether no training group is held back for validation, so that calibration uses cross-fitting.

        Cross-fitting trains further models on parts of the training groups. Their logits for the other groups choose
        temperature and threshold. The value is True for a model on features, and for a network if
        ``inner_validation_share`` is 0.
        """
        return bool(self.of_features) or not self.inner_validation_share

    @property
    def has_frozen_trunk(self) -> bool:
        """Return whether the model has a trunk (feature extractor) that keeps its published weights in all trainings.

        The features of such a trunk can be cached.
        """
        if self.task != DEFAULT_TASK or self.of_features == "forensic" or DETECTORS.file_of(self.model) is not None:
            return False
        spec = DETECTORS.get(self.model)
        given = bool(self.model_weights) or spec.brings_weights
        return bool(spec.build_trunk and (self.tune or spec.tune) == "head" and given)

    @property
    def recipe(self) -> str:
        """Return the name of the recipe for re-encoding every video before it is decoded; empty: no re-encoding."""
        rescaling = f"rescale_{self.rescale}_at_{RESCALE_RATE}" if self.rescale else ""
        return "_".join(filter(None, ("canonical" if self.canonical else "", rescaling)))

    @property
    def config_hash(self) -> str:
        """Return the SHA-256 (hexadecimal) of all fields that can change a result; it is the same on any machine."""
        return sha256_of_json(self._identities(DECLARED.keys() - NOT_HASHED))

    @property
    def training_hash(self) -> str:
        """Return the SHA-256, in hexadecimal, of the fields that change the data or the trained weights.

        A fork (a new run that takes over the trainings of this run) has the same value.
        """
        return sha256_of_json(self._identities(STARTS_ANEW - NOT_HASHED))

    def training_values(self) -> dict[str, Any]:
        """Return the values of the fields that change the trained weights, by field name.

        Checkpoints store them. Fields that change the data are left out.
        """
        return self._identities(_OF_WEIGHTS)

    def values_read_by(self, stage: Stage, offered: Iterable[str] = ()) -> dict[str, Any]:
        """Return the values on which the result of ``stage`` depends, by field name.

        The result has the fields that the stage reads and that can change results, without fields whose value is a
        path. A stage reads the fields that are declared for it and the fields in ``offered``. For a stage that trains,
        all fields that change the trained weights are added, including paths.

        Args:
            stage: the stage (one notebook of a run).
            offered: names of fields that are parameters of the stage's notebook.
        """
        read = {name for name, declared in DECLARED.items() if stage.name in declared.stages}.union(offered)
        of_results = {name for name in _COUNTED & read if not DECLARED[name].path}
        return self._identities(of_results | _OF_WEIGHTS if stage.trains else of_results)

    def _identities(self, names: Set[str]) -> dict[str, Any]:
        """Return the JSON values from which hashes are computed, for the fields in ``names``, by field name.

        Fields that the task does not read are left out. Fields with their neutral value are left out, too: with this
        value, results are the same as before the field was added to the library. So a new field does not change the
        hashes of earlier runs.
        """
        values = self.relevant()
        hashed = [name for name in values if name in names and values[name] != NEUTRAL.get(name, ...)]
        return {name: self.identity(name) for name in hashed}

    def identity(self, name: str) -> Any:
        """Return the JSON value that represents the field ``name`` in hashes.

        If the value is the path of a user's file, a digest of the file's content replaces the path.
        """
        value = self.model_dump(mode="json", include={name})[name]
        if DECLARED[name].content and value:
            return content_digest(Path(value))
        for _, mark in self._marks([name]):
            value = mark.identity(value)
        return value

    def code_chosen(self, names: Iterable[str]) -> list[str]:
        """Return the dotted names of the library's modules that register the chosen items, such as the chosen model.

        ``names`` are names of fields. Fields whose value does not choose a registered item are ignored.
        """
        return [module for name, mark in self._marks(names) for module in mark.files(getattr(self, name))]

    def load_chosen(self) -> None:
        """Import the files of all items that this task's fields choose by name, such as the model.

        Raises:
            UsageError: a file cannot be imported; the message has its path and the error.
        """
        for name, mark in self._marks(self.relevant()):
            mark.load(getattr(self, name))

    def _marks(self, names: Iterable[str]) -> list[tuple[str, NameIn]]:
        fields = {name: field for name, field in type(self).model_fields.items() if name in set(names)}
        return [(name, mark) for name, field in fields.items() for mark in field.metadata if isinstance(mark, NameIn)]

    def relevant(self) -> dict[str, Any]:
        """Return the JSON values of the fields that the run's task reads, by field name, in declared order."""
        values = self.model_dump(mode="json")
        return {name: value for name, value in values.items() if self.task in DECLARED[name].tasks}

    def to_yaml(self) -> str:
        """Return the fields that the run's task reads as YAML text, with their meanings as comments."""
        lines = []
        for name, value in self.relevant().items():
            text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").rstrip()
            lines.append(f"{name}: {text}  # {meaning(name)}")
        return "\n".join(lines) + "\n"


def meaning(name: str) -> str:
    """Return the description of field ``name``, in one line."""
    return RunConfig.model_fields[name].description or ""


# A field that was not declared with ``field`` raises KeyError or TypeError here.
DECLARED: Mapping[str, Declaration] = {
    name: cast(Any, field.json_schema_extra)["declaration"] for name, field in RunConfig.model_fields.items()
}
DEFAULTS = {name: field.default for name, field in RunConfig.model_fields.items()}
# Neutral values as JSON, by field: a field with this value is left out of hashes and of checkpoint bindings.
NEUTRAL: Mapping[str, Any] = {
    name: list(declared.neutral) if isinstance(declared.neutral, tuple) else declared.neutral
    for name, declared in DECLARED.items()
    if declared.neutral is not ...
}
ENVIRONMENT = {declared.variable: name for name, declared in DECLARED.items() if declared.variable}
NOT_HASHED = frozenset(name for name, declared in DECLARED.items() if not declared.hashed)
MAY_CHANGE_ON_RESUME = frozenset(name for name, declared in DECLARED.items() if declared.resume)


def _changing(*parts: str) -> frozenset[str]:
    return frozenset(name for name, declared in DECLARED.items() if declared.changes in parts)


STARTS_ANEW = _changing(*TRAINED)
OF_THE_FOLDER = _changing("folder")
_OF_WEIGHTS, _COUNTED = _changing("weights"), _changing(*TRAINED, "results")


def require_known(name: str) -> None:
    """Check that the configuration has a field ``name``; else raise ``UsageError``, which suggests similar names."""
    if name not in RunConfig.model_fields:
        near = did_you_mean(name, RunConfig.model_fields)
        raise UsageError(f"unknown parameter {name!r}.{near} Each notebook's: {command_text('--list')}")
