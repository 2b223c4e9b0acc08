"""Declare the tasks of runs, their stages and the protocols as plain data.

A task is a learning problem, such as detecting fake videos; a run solves one task. A stage is the work of one notebook
of a run. A task consists of its declaration here and of a folder ``fvc_lib/tasks/NAME/``, whose module ``training``
defines the function that ``TaskSpec.trainer`` names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fvc_lib.services.run_paths import RunPaths

DATA_INDEX = "01_data_index"
FOLD_ASSIGNMENT = "02_folds"
AUGMENTATION = "03_augmentation"
FORENSIC_FEATURES = "03b_forensic_features"
FOLD_TRAINING = "04_fold_training"
FINAL_TRAINING = "04b_final_training"
KFOLD_RESULTS = "05_kfold_results"
ANALYSIS_DASHBOARD = "06_analysis_dashboard"
MEMORY_REPORT = "07_memory_report"
DETECTOR_COMPARISON = "08_detector_comparison"  # compares several runs, and so is no stage of a run
ROBUSTNESS = "09_robustness"  # judges a finished run, on request, and so is no stage of a run
IMAGE_RECOGNITION = "10_image_recognition"
ENSEMBLE = "11_ensemble"  # combines several runs, and so is no stage of a run
VIDEO_TEXT = "20_video_text"
VERDICTS = "30_verdicts"  # judges any files by a finished run, and so is no stage of a run
PREDICTIONS = "predictions"  # likewise, of the other tasks; it has no notebook
SCORE_AUDIT = "40_score_audit"  # of a table of scores, and so no stage of a run

# Control trainings of a fold, which show what a score is worth: names for folders and log phases, and for people.
SHUFFLED_LABELS, REAL_SOURCES = "control", "sources"
CONTROL_TRAININGS = {SHUFFLED_LABELS: "shuffled labels", REAL_SOURCES: "two sources of reals"}

Files = Callable[[RunPaths, int | None], Sequence[Path]]


def _files(*names: str) -> Files:
    """Return a function that lists the input or output files of a stage.

    The returned function takes a run (``RunPaths``) and a fold, which it ignores. It returns the paths of the run that
    ``names`` select; these are names of attributes of ``RunPaths``.
    """
    return lambda run, _fold: tuple(getattr(run, name) for name in names)


@dataclass(frozen=True)
class Stage:
    """The declaration of a stage, which is the part of a run that one notebook does.

    Attributes:
        name: name of the notebook, without suffix.
        needs: names of stages that must finish before this one, if the run has them.
        inputs: function of a run and a fold (None without folds); returns the paths of the files that the stage reads.
        outputs: function with the same arguments; returns the paths of the files that the stage writes for later
            stages. The stage is finished when they exist and fit their schemas, and its inputs, parameters and code are
            unchanged.
        per_fold: whether the stage runs once per outer fold.
        sharded: function of a configuration; returns whether the stage has shards. Shards are jobs that divide the
            stage's files or clips among them. They store results in caches before the notebook runs.
        trains: whether the stage trains: it uses ranks (processes) and GPUs, and writes checkpoints.
        tasks: names of the tasks whose runs have this stage.
        schemas: names of schemas in ``services.tables``, one per output in order; empty: the outputs are no tables.
        report_rank: sort key of the stage's section in a report.
        beside: function with the same arguments as ``inputs``; returns the paths of further output files, which not
            every run has. The stage's record lists them. Before the stage is repeated, they are moved away.
        when: function of a configuration (``RunConfig``); returns whether the run has this stage.
        when_words: the condition ``when`` in words for messages, such as ``whose model sees clips``; empty: all runs of
            ``tasks`` have the stage.
        needs_when: further stages that must finish before this one, whose results it reads in some runs only. The dict
            maps the name of such a stage to a function of a configuration, which returns whether they are read.
    """

    name: str
    needs: tuple[str, ...]
    inputs: Files
    outputs: Files
    per_fold: bool = False
    sharded: Callable[[Any], bool] = lambda _config: False
    trains: bool = False
    tasks: tuple[str, ...] = ("video",)
    schemas: tuple[str, ...] = ()
    report_rank: int = 1
    beside: Files = lambda _run, _fold: ()
    when: Callable[[Any], bool] = lambda _config: True
    when_words: str = ""
    needs_when: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)

    @property
    def comes_after(self) -> tuple[str, ...]:
        """Return the names of all stages that must finish before this one.

        A run need not have all of these stages.
        """
        return (*self.needs, *self.needs_when)

    def reads(self, config: Any) -> set[str]:
        """Return the names of the stages whose results this stage reads in a run with the parameters ``config``."""
        return {*self.needs, *(name for name, is_read in self.needs_when.items() if is_read(config))}

    @property
    def training_module(self) -> str:
        """Return the dotted name of the module with the task's training function; empty if the stage does not train.

        It is a name, because the import of the module takes seconds (it loads torch).
        """
        return f"fvc_lib.tasks.{self.tasks[0]}.training" if self.trains else ""

    def check_outputs(self, run: RunPaths, fold: int | None) -> None:
        """Read every table that the stage wrote for ``run`` (and ``fold``), and check it against its schema.

        Nothing is checked if the stage has no tables.

        Raises:
            DataError: an output is missing, unreadable or does not fit; the message names file, column and values.
        """
        if self.schemas:
            from fvc_lib.services import tables  # polars takes a quarter of a second to load

            for path, schema in zip(self.outputs(run, fold), self.schemas, strict=True):
                tables.read_table(path, getattr(tables, schema))


@dataclass(frozen=True)
class TaskSpec:
    """The declaration of a task (a learning problem): its stages, training function and default parameters."""

    name: str  # name of the task, and of its folder in ``fvc_lib/tasks``
    stages: tuple[Stage, ...]  # in the order of their numbers
    trainer: str  # name of the training function in the task's module ``training``; same arguments as ``train_fold``
    params: str  # name, without suffix, of the params file that suits the task's built-in corpus
    network: str  # the configuration field that names the network
    synthetic: str  # end of a sentence for built-in corpora: the number does not show how well ...
    # Defaults for runs of the task; every other source of parameters overrides them.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Name of the class in the task's module ``predicting`` that predicts for new files (a ``Predictor``).
    predictor: str = ""
    # Rules that find the headline number (the result shown first), the preferred one first: beginning of its subject,
    # beginning of its metric, and what it counts, such as images. Empty: results over folds define it.
    headline: tuple[tuple[str, str, str], ...] = ()
    # Controls that the headline number must exceed before any claim: by the beginning of its subject (empty over folds)
    # the commands that compute a missing control, by the control's name.
    strict_controls: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    no_headline: tuple[str, str] = ("", "")  # metric's name and what it counts, shown while there is no number yet
    sample: str = "built-in corpus"  # name of the built-in corpus in sentences
    # Names of at most three metrics whose learning curves are shown. A name with ``*`` stands for the first match.
    curves: tuple[str, ...] = ("loss",)

    @property
    def training_stage(self) -> Stage:
        """Return the first stage of the task that trains."""
        return next(stage for stage in self.stages if stage.trains)


def _takes_forensic(config: Any) -> bool:
    """Return whether the model in ``config`` takes forensic features (measured numbers) as input."""
    return config.of_features in ("forensic", "both")


def _has_videos(config: Any) -> bool:
    """Return whether a run with ``config`` reads video files of the user.

    The result is False for the built-in sample corpus, and if only the label tables of a corpus are read. Only stages
    that read such files can be divided into shards (jobs that process a share of the files).
    """
    return bool(config.corpus) and not config.annotations_only


def _again(stage: str) -> str:
    return f"run_notebooks.py --only {stage.partition('_')[0]} --resume RUN"


_VIDEO = TaskSpec(
    name="video",
    stages=(
        Stage(
            DATA_INDEX,
            (),
            _files(),
            _files("index", "rejected", "group_links", "annotations"),
            sharded=_has_videos,
            schemas=("INDEX", "REJECTED", "GROUP_LINKS", "ANNOTATIONS"),
            beside=_files("original_index"),
        ),
        Stage(
            FOLD_ASSIGNMENT,
            (DATA_INDEX,),
            _files("index"),
            _files("folds", "protocol"),
            schemas=("FOLDS", "PROTOCOL"),
        ),
        Stage(
            AUGMENTATION,
            (DATA_INDEX,),
            _files("index"),
            _files("augmented_metadata"),
            sharded=_has_videos,
            schemas=("AUGMENTED",),
            beside=_files("seen_clips"),
            when=lambda config: bool(config.of_features != "forensic"),  # such a model sees no clips
            when_words="whose model sees clips",
        ),
        Stage(
            FORENSIC_FEATURES,
            (DATA_INDEX,),
            _files("index"),
            _files("features"),
            sharded=_has_videos,
            schemas=("FEATURES",),
            when=lambda config: config.forensic_features or _takes_forensic(config),
            when_words="with -p forensic_features true, or whose model sees them",
        ),
        Stage(
            FOLD_TRAINING,
            (FOLD_ASSIGNMENT, AUGMENTATION),
            _files("index", "folds", "protocol", "augmented_metadata"),
            lambda run, fold: (run.predictions(0 if fold is None else fold),),
            per_fold=True,
            sharded=lambda config: _has_videos(config) and bool(config.has_frozen_trunk),
            trains=True,
            schemas=("PREDICTIONS",),
            report_rank=2,
            needs_when={FORENSIC_FEATURES: _takes_forensic},
            beside=lambda run, fold: (run.validation_predictions(fold or 0),),
        ),
        Stage(
            FINAL_TRAINING,
            (FOLD_TRAINING,),
            _files("index", "folds", "protocol", "augmented_metadata"),
            _files("final_validation"),
            trains=True,
            schemas=("FINAL_VALIDATION",),
            report_rank=2,
            beside=_files("final_features"),
            when=lambda config: config.train_final,
            when_words="with -p train_final true",
            needs_when={FORENSIC_FEATURES: _takes_forensic},
        ),
        Stage(
            KFOLD_RESULTS,
            (FOLD_TRAINING,),
            lambda run, _: (
                run.index, run.folds, run.protocol, *sorted(run.tables.glob("predictions_fold_*.parquet"))
            ),
            _files("results", "slices", "leakage_audit"),
            schemas=("RESULTS", "SLICES", "LEAKAGE_AUDIT"),
            report_rank=0,
            beside=_files("scores", "video_frames", "test_features"),
        ),
        Stage(
            ANALYSIS_DASHBOARD,
            (KFOLD_RESULTS,),
            _files("results"),
            _files(),
            report_rank=3,
        ),
    ),
    trainer="train_fold",
    params="demo",
    network="model",
    synthetic="fakes in the world are recognised",
    predictor="VideoDetector",
    sample="sample videos",
    strict_controls={
        "": {
            **dict.fromkeys(
                ("constant", "metadata_only", "length_only", "group_lookup_by_group"), _again(KFOLD_RESULTS)
            ),
            "shuffled_labels": "run_notebooks.py --resume RUN --fork -p shuffled_label_control true",
        }
    },
)  # fmt: skip

_IMAGE = TaskSpec(
    name="image",
    stages=(
        Stage(
            IMAGE_RECOGNITION,
            (),
            _files(),
            _files(
                "images", "rejected", "image_targets", "leakage_audit", "image_predictions", "target_predictions",
                "task_results",
            ),
            trains=True,
            tasks=("image",),
            schemas=(
                "IMAGES", "REJECTED", "IMAGE_TARGETS", "LEAKAGE_AUDIT", "IMAGE_PREDICTIONS", "TARGET_PREDICTIONS",
                "TASK_RESULTS",
            ),
            report_rank=0,
        ),
    ),
    trainer="train_images",
    predictor="ImagePredictor",
    params="image",
    network="backbone",
    synthetic="dishes in the world are recognised",
    sample="sample dishes",
    defaults={
        "effective_batch_size": 24,
        "learning_rate": 2e-3,
        "early_stopping_epochs": 0,
        "label_smoothing": 0.1,
        "mixup_alpha": 0.2,
        "cutmix_alpha": 1.0,
    },
    headline=(("all", "top1", "image"), ("target:", "r2", "image")),
    strict_controls={
        "all": {"majority_class": _again(IMAGE_RECOGNITION)},
        "target:": {"mean_predictor": _again(IMAGE_RECOGNITION)},
    },
    no_headline=("Top-1 accuracy", "image"),
    curves=("loss", "top1", "r2_*"),
)  # fmt: skip

_VIDEO_TEXT = TaskSpec(
    name="video_text",
    stages=(
        Stage(
            VIDEO_TEXT,
            (),
            _files(),
            _files("video_texts", "rejected", "leakage_audit", "retrieval_ranks", "captions", "task_results"),
            trains=True,
            tasks=("video_text",),
            schemas=("VIDEO_TEXTS", "REJECTED", "LEAKAGE_AUDIT", "RETRIEVAL_RANKS", "CAPTIONS", "TASK_RESULTS"),
            report_rank=0,
            beside=_files("embeddings"),
        ),
    ),
    trainer="train_video_text",
    predictor="VideoTextPredictor",
    params="video_text",
    network="model",
    synthetic="videos of the world are described",
    sample="sample captions",
    defaults={
        "model": "frame_cnn",
        "effective_batch_size": 32,
        "learning_rate": 1e-3,
        "epochs": 30,
        "early_stopping_epochs": 0,
    },
    headline=(("text_to_video", "recall@", "text"), ("captions", "content_word_recall", "video")),
    strict_controls={
        "text_to_video": {"chance": _again(VIDEO_TEXT)},
        "captions": {"most_frequent_caption": _again(VIDEO_TEXT)},
    },
    no_headline=("Recall, text to video", "text"),
    curves=("loss", "text_to_video/recall@1", "caption_loss*"),
)  # fmt: skip

TASKS: Mapping[str, TaskSpec] = {spec.name: spec for spec in (_VIDEO, _IMAGE, _VIDEO_TEXT)}
# The task of a run that names none.
DEFAULT_TASK = _VIDEO.name

# The memory report reads all memory logs. They are not among its inputs, because a changed input makes a stage run
# again and logs grow whenever a notebook is opened.
_MEMORY_REPORT = Stage(
    MEMORY_REPORT,
    tuple(spec.stages[-1].name for spec in TASKS.values()),
    _files("results", "task_results"),
    _files(),
    tasks=tuple(TASKS),
    report_rank=4,
)
_STAGES_OF_TASKS = tuple(stage for spec in TASKS.values() for stage in spec.stages)
STAGES = tuple(sorted((*_STAGES_OF_TASKS, _MEMORY_REPORT), key=lambda stage: stage.name))
TRAINING_STAGES = tuple(stage.name for stage in STAGES if stage.trains)
# The tasks of all stages that belong to another task than the default one, by the stage's name.
TASK_OF_STAGE: Mapping[str, str] = {
    stage.name: spec.name for spec in TASKS.values() if spec.name != DEFAULT_TASK for stage in spec.stages
}


# The protocols that divide a corpus into training and test parts. ``fvc_lib/corpus/protocols.py`` applies them.
# They are declared here so that the plan of a run can read the number of trainings without loading polars.

KFOLD = "kfold"
OFFICIAL = "official"
OFFICIAL_STRICT = "official_strict"
CROSS_CORPUS, LEAVE_ONE_GENERATOR_OUT = "cross_corpus", "leave_one_generator_out"
LEAVE_ONE_SOURCE_OUT = "leave_one_source_out"
LENGTH_MATCHED, METADATA_MATCHED = "length_matched", "metadata_matched"


@dataclass(frozen=True)
class ProtocolSpec:
    """A protocol: a rule that divides a corpus into training, validation and test videos.

    ``meaning`` explains the protocol in messages, after its name and a colon. ``trains_once`` says whether there is a
    single training instead of one per fold.
    """

    name: str
    meaning: str
    trains_once: bool = False


PROTOCOLS: Mapping[str, ProtocolSpec] = {
    spec.name: spec
    for spec in (
        ProtocolSpec(KFOLD, "every group is tested once, by a model that has seen none of it"),
        ProtocolSpec(OFFICIAL, "trained, chosen and tested on the corpus's own parts, leaks and all", trains_once=True),
        ProtocolSpec(
            OFFICIAL_STRICT, "the corpus's own parts, without training videos whose groups are tested", trains_once=True
        ),
        ProtocolSpec(CROSS_CORPUS, "trained on some corpora, tested on each of the others", trains_once=True),
        ProtocolSpec(
            LEAVE_ONE_GENERATOR_OUT, "each generator's fakes are tested by models that have seen none of that generator"
        ),
        ProtocolSpec(
            LEAVE_ONE_SOURCE_OUT, "each source's videos are tested by models that have seen none of that source"
        ),
        ProtocolSpec(LENGTH_MATCHED, "folds of as many real as fake videos of each length"),
        ProtocolSpec(METADATA_MATCHED, "folds of as many real as fake videos of each codec, size and length"),
    )
}
