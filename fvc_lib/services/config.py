"""One validated configuration for a whole run, each field of it declared in one place.

The field names are the parameter names of the notebooks, so a value means the same in ``params/*.yaml``, behind ``-p``
and in a parameters cell.

A field's declaration (``field``) says besides type, default and meaning which tasks read it and what it may change.
What is hashed, what a checkpoint is bound to, what a run may be resumed with and what starts a fork's training anew
follow from that; nothing else lists fields.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator

from fvc_lib.services.atomic_files import content_digest, sha256_of_json
from fvc_lib.services.clip_settings import ClipSettings, View, known_fit, known_sampling
from fvc_lib.services.config_fields import (
    AUTO_RANKS,
    RETIRED,
    TRAINED,
    Declaration,
    NameIn,
    field,
    known_families,
    known_operating_point,
    known_task,
    known_tuning,
    number_or_auto,
    or_empty,
    possible_height,
    possible_side,
    split_names,
    split_numbers,
    split_pairs,
)
from fvc_lib.services.errors import UsageError, command_text, did_you_mean
from fvc_lib.services.memory.policy import Acceleration
from fvc_lib.services.registry import AUGMENTATIONS, BACKBONES, CROPS, DETECTORS, IMAGE_LAYOUTS
from fvc_lib.services.run_paths import beside_the_code
from fvc_lib.services.tasks import DEFAULT_TASK, KFOLD, PROTOCOLS, known_protocol

_VIDEO, _IMAGE, _PAIRS = ("video",), ("image",), ("video_text",)
_CLIPS, _LABELLED, _SPLIT = ("video", "video_text"), ("video", "image"), ("image", "video_text")
# What to give instead where a task does not read a field
_ONE_SPLIT = "There is one split: split_validation_share and split_test_share say how large its parts are."
_BY_LABEL = "Labels are shuffled where videos are told real from fake."
_SIDE = "The side of an image is image_size, of a video's frames fixed_size."
_NET = "The network on images is backbone, on videos model; with -p task beside it either name does."
_ONE_CLIP = "Task video_text takes one clip of each video, of the whole picture."
_STORE = "Images are read where they lie."
_CORPUS_OF = {
    "image": "folder or manifest of images; empty: the generated pictures of dishes",
    "video_text": "manifest of videos and texts, its folder, or tars; empty: the generated clips with captions",
}


class RunConfig(BaseModel):
    """Everything that is asked of a run. Unknown names are refused; defaults are the memory-conservative ones."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    task: Annotated[str, AfterValidator(known_task)] = field(
        DEFAULT_TASK, "data", "real or fake videos; image classes and numbers; or videos and texts that describe them"
    )
    experiment: str = field("default", "folder", "folder under the runs folder that groups runs")
    # Not hashed: what it lists counts, in each stage's fingerprint, and not where it lies.
    corpus: str = field(
        "",
        "data",
        "folder, CSV/Parquet manifest, tar or pattern of tars; empty: the sample corpus",
        hashed=False,
        path=True,
        meaning=_CORPUS_OF,
    )
    more_corpora: Annotated[tuple[str, ...], BeforeValidator(split_names)] = field(
        (),
        "data",
        "further corpora, indexed together with it: A,B",
        _VIDEO,
        hashed=False,
        path=True,
        instead="Task image takes a folder of several corpora.",
    )
    allow_outside: bool = field(False, "data", "read listed files outside the corpus folder, and follow links")
    label_map: Annotated[dict[str, Literal["real", "fake"]], BeforeValidator(split_pairs)] = field(
        {}, "data", "what a manifest's labels other than real and fake mean: 1=fake,0=real", _VIDEO
    )
    seed: int = field(0, "weights", "the one seed every random choice is derived from", ge=0, lt=2**31)

    # No stage's measured memory is void where it differs: what is expected follows the number (execution.plan).
    workers: int = field(
        0, "nothing", "processes that probe, decode or measure at once; 0: one per core, as memory allows", ge=0
    )

    # Index
    max_rejected_share: float = field(
        0.5, "results", "stop the run when more than this share of the listed files is unusable", ge=0, le=1
    )
    near_duplicate_bits: int = field(
        10, "data", "perceptual hashes closer than this many of 64 bits join groups; 0: off", ge=0, le=32
    )
    annotations_only: bool = field(
        False, "results", "index the label tables of a corpus whose videos are not here; only 01 can run", _VIDEO
    )

    dev_groups: int = field(
        0,
        "data",
        "trial: so many whole groups, drawn by seed, which claim nothing; 0: all",
        _VIDEO,
        later=True,
        ge=0,
    )
    canonical: bool = field(
        False,
        "data",
        "re-encode every video by one recipe before it is decoded or measured: containers then tell nothing",
        _VIDEO,
        later=True,
    )

    rescale: Annotated[int, AfterValidator(possible_height)] = field(
        0,
        "data",
        "bring every video to so many rows, its shape kept, and to one rate before it is decoded or measured; 0: off",
        _VIDEO,
        later=True,
        ge=0,
        le=2160,
    )
    # Where a video has fewer, frames are repeated, and that becomes the label: at 25 a second the metadata of generated
    # videos of 8 and filmed ones of 25 to 30 told them apart with AUC 0.98 (0.94 at 10), at 8 with 0.51.
    rescale_rate: int = field(
        8,
        "data",
        "frames a second that rescale gives: at best no more than any video has",
        _VIDEO,
        later=True,
        ge=1,
        le=120,
    )

    # Which videos train and which test
    protocol: Annotated[str, AfterValidator(known_protocol)] = field(
        KFOLD,
        "weights",
        f"which videos train and which test: {', '.join(PROTOCOLS)}",
        _VIDEO,
        later=True,
        instead=_ONE_SPLIT,
    )
    target_corpora: Annotated[tuple[str, ...], BeforeValidator(split_names)] = field(
        (), "weights", "the corpora that cross_corpus tests on, by name; it trains on the others", _VIDEO, later=True
    )
    num_folds: int = field(5, "weights", "outer folds; each group is tested once", _VIDEO, ge=2, instead=_ONE_SPLIT)
    folds_seed: int | None = field(
        None, "weights", "deals the folds, so that other seeds share them; none: seed", _VIDEO, later=True, ge=0
    )
    inner_validation_share: float = field(
        0.25, "weights", "of the training groups, chooses epoch and threshold", _VIDEO, gt=0, lt=1, instead=_ONE_SPLIT
    )

    # The other tasks have one split instead of folds: the corpus's own, or one made of whole groups
    split_validation_share: float = field(
        0.15, "data", "share of the training groups that chooses the epoch", _SPLIT, gt=0, lt=1
    )
    split_test_share: float = field(
        0.2, "data", "share of the groups tested on, where the corpus has no split of its own", _SPLIT, gt=0, lt=1
    )

    # Decode
    num_frames: int = field(
        0,
        "weights",
        "frames taken uniformly from each video; 0: as many as the model was made for",
        _CLIPS,
        ge=0,
    )
    fixed_size: Annotated[int, AfterValidator(possible_side)] = field(
        0,
        "weights",
        "side in pixels of the square frames are fitted to; 0: the side the model was made for",
        _CLIPS,
        ge=0,
        le=2048,
        variable="FVC_FIXED_SIZE",
        instead=_SIDE,
    )
    frame_sampling: Annotated[str, or_empty(known_sampling)] = field(
        "",
        "weights",
        "uniform: frames spread over the video; window:STRIDE: neighbours; empty: the model's",
        _CLIPS,
        later=True,
    )
    frame_fit: Annotated[str, or_empty(known_fit)] = field(
        "",
        "weights",
        "letterbox; crop: shorter side resized, middle cut out; crop:0.875: resized 8/7 as large; empty: the model's",
        _CLIPS,
        later=True,
    )
    clips_per_video: int = field(
        1,
        "weights",
        "clips of one video: training draws one, test averages their logits",
        _VIDEO,
        ge=1,
        le=64,
        later=True,
        instead=_ONE_CLIP,
    )
    crop: Annotated[str, NameIn(CROPS, or_else="")] = field(
        "",
        "weights",
        "face (needs the extra faces), or my_crop.py:function: what each clip is cropped to; empty: nothing",
        _VIDEO,
        later=True,
        instead=_ONE_CLIP,
    )
    crop_margin: float = field(0.3, "weights", "share by which a crop's side grows", _VIDEO, ge=0, le=4, later=True)

    # Augmentation
    augmentations_per_video: int = field(2, "weights", "augmented clips made of each training video", _VIDEO, ge=0)
    # Not noise, blur, cutout, resampling or repeated frames: they imitate the traces a fake leaves. With all nine
    # operations an earlier network's AUC on the sample corpus fell from 0.97-0.99 to 0.73-0.91.
    augmentations: Annotated[tuple[str, ...], NameIn(AUGMENTATIONS), BeforeValidator(split_names)] = field(
        ("flip",), "weights", "operations a clip may receive: flip, affine, noise ...", _VIDEO
    )
    augmentation_strength: float = field(1.0, "weights", "scales every operation; 1 is moderate", _VIDEO, ge=0, le=3)
    # Not to be changed on resume: shards are written in a stage that would be skipped as finished.
    clip_source: Literal["store", "shards", "stream"] = field(
        "store",
        "nothing",
        "store: a file per clip; shards: tar files, read at any place; stream: each from its beginning to its end",
        _CLIPS,
        resume=False,
        instead=_STORE,
    )
    shuffle_buffer: int = field(
        0,
        "weights",
        "of a stream, among how many clips the next is drawn: the more, the better mixed; 0: no stream",
        _CLIPS,
        ge=0,
        later=True,
        instead=_STORE,
    )

    # Forensic features
    forensic_features: bool = field(False, "nothing", "measure them, whatever the model sees", _VIDEO, later=True)
    feature_families: Annotated[str, AfterValidator(known_families)] = field(
        "all", "weights", "families of forensic features that are measured, or all: A,B", _VIDEO, later=True
    )

    # Training
    model: Annotated[str, NameIn(DETECTORS)] = field(
        "efficientnet_lite0", "weights", "network that sees a video's frames", _CLIPS, instead=_NET
    )
    model_weights: str = field(
        "",
        "weights",
        "file or folder of published weights; empty: those that come with it, or none",
        _CLIPS,
        later=True,
        path=True,
        content=True,
        instead="The weights of a network on images are backbone_weights.",
    )
    allow_download: bool = field(
        False, "nothing", "fetch the network's weights from the hub where they are a name there: organisation/name"
    )
    head: Literal["", "mean", "attention", "gru", "path"] = field(
        "", "weights", "mean, attention, gru or path; empty: the model's", _VIDEO, later=True
    )
    l2_normalise: bool = field(False, "weights", "bring each feature vector to length 1", _VIDEO, later=True)
    tune: Annotated[str, AfterValidator(known_tuning)] = field(
        "", "weights", "head, norms, last:N, effort or all; empty: the model's", _VIDEO, later=True
    )
    epochs: int = field(20, "weights", "at most this many passes over the training part", ge=1)
    # Hashed as ever, because folders are named by the hash; so are device and retrieval_memory_mb.
    batch_size: int = field(0, "rounding", "samples in memory at once; 0: the network's default", ge=0, hashed=True)
    effective_batch_size: int = field(16, "weights", "samples per optimizer step, reached by accumulation", ge=1)
    learning_rate: float = field(0.003, "weights", "AdamW's peak rate after warm-up, before cosine decay", gt=0)
    weight_decay: float = field(0.01, "weights", "AdamW's decoupled weight decay", ge=0)
    warmup_share: float = field(0.1, "weights", "share of all steps spent warming up linearly", ge=0, lt=1)
    max_gradient_norm: float = field(1.0, "weights", "gradients are clipped to this L2 norm", gt=0)
    ema_decay: float = field(
        0.0,
        "weights",
        "what a moving average of the weights keeps of itself in a step; that average is tested; 0: off",
        ge=0,
        lt=1,
        later=True,
    )
    class_balance: Literal["loss", "sampler", "batch", "none"] = field(
        "loss",
        "weights",
        "loss: weigh the loss by class; sampler: draw classes evenly; batch: so in every effective batch; none",
        _LABELLED,
    )
    early_stopping_epochs: int = field(
        6, "weights", "stop after this many epochs without a better validation loss; 0: never", ge=0
    )
    amp: Literal["auto", "off"] = field("auto", "weights", "mixed precision where the device has it")
    device: Literal["auto", "cuda", "mps", "cpu"] = field(
        "auto", "rounding", "auto: cuda, else mps, else cpu", hashed=True
    )
    # None is on by itself: on a GPU nothing was measured yet, for what a CPU gains see docs/measurements.md.
    accelerations: Annotated[tuple[Acceleration, ...], BeforeValidator(split_names)] = field(
        (), "rounding", f"for speed, any of {', '.join(get_args(Acceleration))}: A,B"
    )
    num_workers: int = field(0, "nothing", "loader processes, as cores and memory allow; 0: none", ge=0)
    num_ranks: Annotated[int, BeforeValidator(number_or_auto)] = field(
        1,
        "rounding",
        "processes, one per GPU where there are any, that share a training; auto: as GPUs allow when the run is made",
        ge=AUTO_RANKS,
    )
    max_nonfinite_steps: int = field(
        5, "nothing", "so many steps with a NaN or infinite loss are skipped; one more stops the training", ge=0
    )
    layer_decay: float = field(
        1.0, "weights", "learning rate of a stage, as a share of the stage above's", _VIDEO, gt=0, le=1, later=True
    )
    # Of task image from the beginning, with the defaults in its ``TaskSpec``
    label_smoothing: float = field(
        0.0, "weights", "share of the class target spread over all classes", _LABELLED, ge=0, lt=1, later=_VIDEO
    )
    focal_gamma: float = field(
        0.0, "weights", "weighs well-classified samples down; 0: off", _LABELLED, ge=0, le=5, later=_VIDEO
    )
    mixup_alpha: float = field(0.0, "weights", "Beta parameter of mixup; 0: off", _LABELLED, ge=0, later=_VIDEO)
    cutmix_alpha: float = field(0.0, "weights", "Beta parameter of cutmix; 0: off", _LABELLED, ge=0, later=_VIDEO)
    mix_share: float = field(
        0.3, "weights", "share of the training samples mixed with another one", _LABELLED, ge=0, le=1, later=_VIDEO
    )
    freeze_backbone_epochs: int = field(
        0, "weights", "train only what is above the backbone for so many epochs first", _LABELLED, ge=0, later=_VIDEO
    )
    unfreeze_stage_epochs: int = field(
        0, "weights", "then free its stages, last first, one per so many epochs; 0: all", _LABELLED, ge=0, later=_VIDEO
    )
    shuffle_labels: bool = field(
        False, "weights", "use labels shuffled by group: an honest pipeline scores chance", _VIDEO, instead=_BY_LABEL
    )
    shuffled_label_control: bool = field(
        True, "results", "train each fold again on shuffled labels, as a control", _VIDEO, instead=_BY_LABEL
    )
    real_source_control: bool = field(
        True, "results", "train each fold again to tell two sources of reals apart, as a floor", _VIDEO, later=True
    )

    train_final: bool = field(
        False, "nothing", "train one network more, on all groups, for verdicts; it has no number of its own", _VIDEO
    )
    operating_point: Annotated[str, AfterValidator(known_operating_point)] = field(
        "best",
        "results",
        "which threshold inner validation chooses: best (balanced accuracy), fpr=0.01 or cost=FALSE_ALARM:MISS",
        _VIDEO,
        later=True,
    )

    # Memory; none of it changes a number beyond rounding
    memory_preflight: bool = field(
        True, "rounding", "measure one step first, and lower batch_size where it needs to be"
    )
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
    image_layout: Annotated[str, NameIn(IMAGE_LAYOUTS, or_else="auto")] = field(
        "auto", "data", "how the corpus of images is laid out; auto: by what lies in it", _IMAGE
    )
    image_size: int = field(224, "weights", "side in pixels of an image", _IMAGE, ge=16, le=2048, instead=_SIDE)
    targets: Annotated[tuple[str, ...], BeforeValidator(split_names)] = field(
        (), "weights", "numeric columns to predict beside the class; empty: all there are; none: no regression", _IMAGE
    )
    dev_samples_per_class: int = field(
        0, "weights", "dev mode: a seeded subset of so many training images per class; 0: all", _IMAGE, ge=0
    )

    # Image model and loss
    backbone: Annotated[str, NameIn(BACKBONES)] = field(
        "small_resnet",
        "weights",
        "small_resnet, torchvision:NAME, or a network on frames: efficientnet_lite0, timm:NAME ...",
        _IMAGE,
        instead=_NET,
    )
    backbone_weights: str = field(
        "", "weights", "file of the backbone's weights; empty: from scratch", _IMAGE, path=True
    )
    regression_weight: float = field(1.0, "weights", "of the regression loss beside the class loss's 1", _IMAGE, ge=0)

    # Videos and texts
    manifest_separator: str = field(",", "data", "between the manifest's columns; any text", _PAIRS, min_length=1)
    max_text_tokens: int = field(32, "weights", "longer texts are cut; beginning and end count", _PAIRS, ge=4, le=512)
    vocabulary_size: int = field(
        2000, "weights", "most byte-pair tokens learned from the training texts", _PAIRS, ge=300
    )

    # Video-text model and losses
    text_encoder: str = field("own", "weights", "own: a small transformer; or a transformers model's folder", _PAIRS)
    embedding_size: int = field(128, "weights", "numbers in the space that videos and texts share", _PAIRS, ge=8)
    text_width: int = field(128, "weights", "numbers per token in the text transformer and the decoder", _PAIRS, ge=16)
    text_layers: int = field(2, "weights", "layers of the text transformer, and of the decoder", _PAIRS, ge=1)
    text_heads: int = field(4, "weights", "attention heads; divides text_width", _PAIRS, ge=1)
    contrastive_loss: Literal["softmax", "sigmoid"] = field(
        "softmax", "weights", "softmax as in CLIP, or sigmoid with a bias as in SigLIP", _PAIRS
    )
    # A loss without weight builds no network for it, so that a fork with another weight starts anew.
    contrastive_weight: float = field(1.0, "weights", "of the contrastive loss; 0: off", _PAIRS, ge=0)
    caption_weight: float = field(1.0, "weights", "of the captioning loss; 0: no decoder", _PAIRS, ge=0)
    masked_weight: float = field(0.0, "weights", "of masked modelling of the clip's features; 0: off", _PAIRS, ge=0)
    masked_share: float = field(
        0.3, "weights", "share of a clip's frames hidden in masked modelling", _PAIRS, gt=0, lt=1
    )
    beam_width: int = field(1, "results", "captions are searched with so many beams; 1: greedily", _PAIRS, ge=1, le=32)

    # Retrieval
    recall_at: Annotated[tuple[int, ...], BeforeValidator(split_numbers)] = field(
        (1, 5, 10), "results", "the k of recall@k", _PAIRS
    )
    retrieval_memory_mb: int = field(
        64, "nothing", "most that retrieval metrics take", _PAIRS, ge=16, hashed=True, resume=False
    )
    training_metrics: bool = field(
        False, "nothing", "measure the training part after each epoch as well: one more pass over it", _PAIRS
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known: dict[str, Any] = {}
        for name, value in values.items():
            if name in RETIRED:  # of an older run or params file; where it said something it must not get lost
                if value != RETIRED[name].default and RETIRED[name].successor:
                    known.setdefault(RETIRED[name].successor, value)
                elif value != RETIRED[name].default:
                    require_known(name)
            else:
                require_known(str(name))
                known[name] = value
        return known

    @property
    def num_trainings(self) -> int:
        """How many networks the protocol trains, each tested on videos of its own; ``num_folds`` says so for most."""
        return 1 if PROTOCOLS[self.protocol].trains_once else self.num_folds

    @property
    def clips(self) -> ClipSettings:
        """How clips are taken: the model's own where a value is 0 or empty, which imports its file."""
        read = self.values_of(lambda declared: True)
        seen = {"clips": read.get("clips_per_video", 1), "crop": read.get("crop", "")}
        seen["margin"] = self.crop_margin if seen["crop"] else 0.0
        asked = (self.num_frames, self.fixed_size, self.frame_sampling, self.frame_fit)
        if all(asked):
            return ClipSettings(*asked[:2], View(*asked[2:], **seen))
        return DETECTORS.load(self.model).clips(*asked, **seen)

    @property
    def of_features(self) -> str:
        """What the model sees in place of clips: ``forensic`` or ``embedding``; empty: it is a network on clips."""
        return DETECTORS.of_features(self.model) if self.task == DEFAULT_TASK else ""

    @property
    def has_frozen_trunk(self) -> bool:
        """Whether a trunk with given weights sees the clips, of which no fold trains anything: features are kept."""
        if self.task != DEFAULT_TASK or self.of_features == "forensic" or DETECTORS.file_of(self.model) is not None:
            return False
        spec = DETECTORS.load(self.model)
        given = bool(self.model_weights) or spec.brings_weights
        return bool((spec.build_trunk or spec.trunk) and (self.tune or spec.tune) == "head" and given)

    @property
    def recipe(self) -> str:
        """Of ``video.reencode``: by which every video is written anew before anything looks at it; empty: by none."""
        rescaling = f"rescale_{self.rescale}_at_{self.rescale_rate}" if self.rescale else ""
        return "_".join(filter(None, ("canonical" if self.canonical else "", rescaling)))

    @property
    def config_hash(self) -> str:
        """Hex SHA-256 over the fields that can change a number: equal on any machine for the same experiment."""
        return sha256_of_json(self._counting(lambda declared: declared.hashed))

    @property
    def training_hash(self) -> str:
        """Hex SHA-256 over the fields that data and weights depend on: equal in a run and in its fork."""
        return sha256_of_json(self._counting(lambda declared: declared.hashed and declared.changes in TRAINED))

    def values_of(self, chosen: Callable[[Declaration], bool]) -> dict[str, Any]:
        """JSON values, by name, of the fields that this task reads and whose declaration is ``chosen``."""
        values = self.model_dump(mode="json")
        read = (name for name in values if self.task in DECLARED[name].tasks)
        return {name: values[name] for name in read if chosen(DECLARED[name])}

    def _counting(self, chosen: Callable[[Declaration], bool]) -> dict[str, Any]:
        """As ``values_of``, without those added later that say nothing but their default."""
        before = {**DEFAULTS, **EARLIER_DEFAULTS}
        said = [n for n in self.values_of(chosen) if not (self._came_later(n) and getattr(self, n) == before[n])]
        return {name: self.identity(name) for name in said}

    def _came_later(self, name: str) -> bool:
        later = DECLARED[name].later
        return later if isinstance(later, bool) else self.task in later

    def identity(self, name: str) -> Any:
        """What the field's value counts as, a JSON value: of a file that it names the content, not the place."""
        value = self.model_dump(mode="json", include={name})[name]
        if DECLARED[name].content and value:
            return content_digest(Path(value))
        for _, mark in self._marks([name]):
            value = mark.identity(value)
        return value

    def code_chosen(self, names: Iterable[str]) -> list[str]:
        """Dotted names of the files that register what the fields ``names`` choose, such as a model's."""
        return [module for name, mark in self._marks(names) for module in mark.files(getattr(self, name))]

    def load_chosen(self) -> None:
        """Import what the fields that this task reads choose by name, such as the model's file.

        Raises:
            UsageError: a file cannot be imported; the message has its path and the error.
        """
        for name, mark in self._marks(self.relevant()):
            mark.load(getattr(self, name))

    def _marks(self, names: Iterable[str]) -> list[tuple[str, NameIn]]:
        fields = {name: field for name, field in type(self).model_fields.items() if name in set(names)}
        return [(name, mark) for name, field in fields.items() for mark in field.metadata if isinstance(mark, NameIn)]

    def relevant(self) -> dict[str, Any]:
        """The fields that this task reads as JSON values, in order."""
        return self.values_of(lambda declared: True)

    def training_values(self) -> dict[str, Any]:
        """What the weights depend on beside the data, as JSON values: a checkpoint is bound to it."""
        return self._counting(lambda declared: declared.changes == "weights")

    def meaning(self, name: str) -> str:
        """What the field ``name`` means to this run's task, one line."""
        return DECLARED[name].meaning.get(self.task) or type(self).model_fields[name].description or ""

    def to_yaml(self) -> str:
        """The resolved parameters as YAML in field order, each with its description as a comment."""
        lines = []
        for name, value in self.relevant().items():
            text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").rstrip()
            lines.append(f"{name}: {text}  # {self.meaning(name)}")
        return "\n".join(lines) + "\n"


def _declaration(name: str) -> Declaration:
    extra: Any = RunConfig.model_fields[name].json_schema_extra
    if extra is None:
        raise TypeError(f"RunConfig.{name}: declare it with field(default, changes, description).")
    declared: Declaration = extra["declaration"]
    return declared


# By field name; what follows is read off it.
DECLARED: Mapping[str, Declaration] = {name: _declaration(name) for name in RunConfig.model_fields}
DEFAULTS = {name: field.default for name, field in RunConfig.model_fields.items()}
ENVIRONMENT = {declared.variable: name for name, declared in DECLARED.items() if declared.variable}
NOT_HASHED = frozenset(name for name, declared in DECLARED.items() if not declared.hashed)
MAY_CHANGE_ON_RESUME = frozenset(name for name, declared in DECLARED.items() if declared.resume)
# With another value a fork trains from the beginning.
STARTS_ANEW = frozenset(name for name, declared in DECLARED.items() if declared.changes in TRAINED)
OF_THE_FOLDER = frozenset(name for name, declared in DECLARED.items() if declared.changes == "folder")


# What runs were made with whose record does not say it.
EARLIER_DEFAULTS = {
    "model": "frame_cnn",
    "num_frames": 6,
    "fixed_size": 112,
    "frame_sampling": "uniform",
    "frame_fit": "letterbox",
}


def require_known(name: str) -> None:
    """Raise ``UsageError``, with what to write instead, where no field has this name."""
    if name in RETIRED:
        instead = f"It is called {RETIRED[name].successor} now." if RETIRED[name].successor else RETIRED[name].why
        raise UsageError(f"parameter {name!r} is no longer there. {instead}")
    if name not in RunConfig.model_fields:
        near = did_you_mean(name, RunConfig.model_fields)
        raise UsageError(f"unknown parameter {name!r}.{near} Each notebook's: {command_text('--list')}")
