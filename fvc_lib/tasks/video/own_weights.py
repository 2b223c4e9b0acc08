"""Going on from the best weights of an own finished run, or of its bundle: which fold's, and that they have not seen
what tests them.

A fold goes on from the run's fold of the same number. The weights of that fold were trained on all other folds of the
run, so of the videos that test the new fold none may be like one of those, nor of the videos that choose its epoch and
threshold like one that was trained on. Alike are videos of one content, near-duplicates (by ``near_duplicate_bits``),
and all that stand in one group with them. The same corpus therefore wants the same split. What a run itself went on
from counts as well; what published weights have seen nobody knows. A bundle has a list of what its networks have seen.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from fvc_lib.corpus.copies.groups import Components
from fvc_lib.corpus.copies.near_duplicates import near_copies
from fvc_lib.detectors.weights import OwnWeights, bundle_of_weights, first_weights, run_of_weights
from fvc_lib.engine.training_state import TrainingRecord
from fvc_lib.services.atomic_files import read_json_object, sha256_of_file
from fvc_lib.services.checkpoint_files import BEST
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import LeakageError, UsageError
from fvc_lib.services.parameters import run_config
from fvc_lib.services.records.digests import read_document
from fvc_lib.services.registry import DETECTORS
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import FOLDS, INDEX, SEEN, read_table
from fvc_lib.tasks.recipe import read_outcome
from fvc_lib.tasks.video.data import rows_to_train_on

_logger = logging.getLogger(__name__)

SEEN_FILE = "seen.parquet"  # of a bundle
SEEN_BEFORE = pl.Schema({"content_sha256": pl.String, "perceptual_hash": pl.String})


@dataclass(frozen=True)
class _Seen:
    """What weights have seen: videos that were trained on, and those that chose the epoch (``_known``)."""

    trained: pl.DataFrame
    chosen_on: pl.DataFrame


class _Run:
    """A run whose folds' weights are gone on from."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths, self.config, self.name = paths, run_config(paths), paths.run_id
        self.num_trainings = self.config.num_trainings
        self.before = _source(self.config)

    @property
    def model(self) -> Any:
        """What its network counts as."""
        return self.config.identity("model")

    def value(self, name: str) -> Any:
        """Of the configuration's field ``name``."""
        return getattr(self.config, name)

    def weights(self, number: int) -> Path:
        """The file of fold ``number``."""
        return self.paths.fold_checkpoints(number) / BEST

    def seen(self, number: int) -> _Seen:
        """By the weights of fold ``number``; ``UsageError`` where there are none."""
        return _seen(self.paths, self.config, number)


class _Bundle:
    """An exported run; ``UsageError`` where its record or a file that is asked for is not what was exported."""

    before = None  # what came before stands in the bundle's own list

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        files = read_document(folder / "digests.json").get("files")
        self._digests: dict[str, Any] = files if isinstance(files, dict) else {}
        record = read_json_object(self._file("bundle.json"))
        params, folds, self.name = record.get("params"), record.get("folds"), str(record.get("run_id"))
        if record.get("final") is not None:
            raise UsageError(
                f"model_weights: the bundle {str(folder)!r} has one network that was trained on all groups, and each "
                "fold needs one that has not seen what tests it. Export the run without --final, or give the run."
            )
        if not isinstance(params, dict) or not isinstance(folds, list) or not folds:
            raise self._refused("bundle.json lacks parameters or folds")
        self._params: dict[str, Any] = params
        self.num_trainings = len(folds)

    @property
    def model(self) -> Any:
        """What its network counts as."""
        model = str(self.value("model"))
        return DETECTORS.identity(str(self._folder / "network" / model) if DETECTORS.file_of(model) else model)

    def value(self, name: str) -> Any:
        """Of the configuration's field ``name``."""
        return self._params.get(name, RunConfig.model_fields[name].default)

    def weights(self, number: int) -> Path:
        """The file of fold ``number``."""
        return self._file(f"model/fold_{number}.safetensors")

    def seen(self, number: int) -> _Seen:
        """By the weights of fold ``number``."""
        if not (self._folder / SEEN_FILE).is_file():
            raise UsageError(
                f"model_weights: the bundle {str(self._folder)!r} does not say what each network has seen: an earlier "
                "version exported it, or its run cannot be gone on from. Export the run again, or give the run."
            )
        rows = read_table(self._file(SEEN_FILE), SEEN).select(
            pl.lit(None, pl.String).alias("video_id"), pl.lit(-1, pl.Int64).alias("fold"),
            pl.format("{} {}", pl.lit(self._folder.name), "group_id").alias("group"),
            "content_sha256", "perceptual_hash", "trained", "chosen_on",
        )  # fmt: skip
        parts = (rows.filter(pl.col(part).list.contains(number)) for part in ("trained", "chosen_on"))
        return _Seen(*(part.drop("trained", "chosen_on") for part in parts))

    def _file(self, name: str) -> Path:
        path = self._folder / name
        if not path.is_file() or sha256_of_file(path) != self._digests.get(name):
            raise self._refused(f"{name} is missing, or not what was exported")
        return path

    def _refused(self, why: str) -> UsageError:
        return UsageError(f"model_weights: bundle {str(self._folder)!r}: {why}. Export the run again, or give the run.")


def _source(config: RunConfig) -> _Run | _Bundle | None:
    """What ``model_weights`` names, where it is a run or a bundle."""
    run, bundle = run_of_weights(config.model_weights), bundle_of_weights(config.model_weights)
    return _Run(run) if run is not None else None if bundle is None else _Bundle(bundle)


def weights_to_go_on_from(
    paths: RunPaths, config: RunConfig, fold: int | None, validation: frozenset[str]
) -> OwnWeights | None:
    """Of what ``model_weights`` names, for ``fold``, whose inner validation videos are named; None where that is
    neither a run nor a bundle. The network of all groups (no fold) goes on from the first fold's.

    Raises:
        UsageError: the run is not finished, or is of another network.
        LeakageError: its weights have seen what is to test or to choose; the message counts the videos.
        DataError: a table of either run is missing or damaged.
    """
    source = _source(config)
    if source is None:
        return None
    _refuse_another_network(source, config)
    number = 0 if fold is None else fold % source.num_trainings
    seen = source.seen(number)
    if _is_split_later(source, number):
        raise UsageError(
            f"model_weights: {source.name} was trained with tune effort on the weights of a run without it, and which "
            "part of them its residual is held to cannot be told from what they began with. Go on from that run itself."
        )
    known = _known(paths)
    is_tested = known["fold"] == (len(known) if fold is None else fold)  # a fold that there is not
    both = seen.trained.vstack(seen.chosen_on)
    bits = config.near_duplicate_bits
    tested = _num_alike(known, is_tested, both, bits)
    chooses = ~is_tested & known["video_id"].is_in(sorted(validation))
    chosen = _num_alike(known, chooses, seen.trained, bits)
    if chosen and fold is None:
        raise LeakageError(
            f"model_weights: the weights of fold {number} of {source.name} have seen videos like {chosen} of those "
            "that choose the epoch of the network of all groups. Leave train_final out, or go on from a run on "
            "a corpus that has none of its videos."
        )
    if tested or chosen:
        raise LeakageError(
            f"model_weights: the weights of fold {number} of {source.name} have seen videos like {tested} of those "
            f"that test fold {fold} here and {chosen} of those that choose its epoch. Go on from a run with the same "
            "corpus, seed, num_folds and inner_validation_share, or on a corpus that has none of its videos."
        )
    _logger.info(
        "fold %s goes on from fold %d of %s; none of the %d videos that those weights have seen is like one that tests "
        "it%s",
        fold, number, source.name, both.height, "" if bits else " (near-duplicates were not looked for)",
    )  # fmt: skip
    return OwnWeights(source.weights(number), first_weights(config), f"{source.name}, fold {number}")


def seen_by_networks(run: RunPaths) -> pl.DataFrame | None:
    """SEEN of a finished run, for its bundle, with numbers for groups; None where it cannot be gone on from."""
    source, parts = _Run(run), []
    for number in range(source.num_trainings):
        if _is_split_later(source, number):
            return None
        seen = source.seen(number)
        for rows, part in ((seen.trained, "trained"), (seen.chosen_on, "chosen_on")):
            parts.append(rows.with_columns(number=pl.lit(number, pl.Int64), part=pl.lit(part)))
    rows = pl.concat(parts)
    groups = {name: f"group_{place}" for place, name in enumerate(rows["group"].unique().sort())}
    each = rows.group_by("group", "content_sha256").agg(
        pl.col("perceptual_hash").first(),
        *(
            pl.col("number").filter(pl.col("part") == part).unique().sort().alias(part)
            for part in ("trained", "chosen_on")
        ),
    )
    each = each.with_columns(group_id=pl.col("group").replace_strict(groups, return_dtype=pl.String))
    return each.select(list(SEEN.columns)).sort("content_sha256", "group_id")


def seen_before(run: RunPaths) -> pl.DataFrame:
    """``content_sha256 perceptual_hash`` of what runs saw that ``run`` went on from; no rows where it did from none.

    Raises:
        UsageError: what it went on from is not finished, or a bundle that does not say what it has seen.
        DataError: a table of that is missing or damaged.
    """
    source = _source(run_config(run))
    seen = [source.seen(number) for number in range(source.num_trainings)] if source is not None else []
    parts = [part.select(SEEN_BEFORE.names()) for each in seen for part in (each.trained, each.chosen_on)]
    return pl.concat([pl.DataFrame(schema=SEEN_BEFORE), *parts]).unique(maintain_order=True)


def _refuse_another_network(source: _Run | _Bundle, config: RunConfig) -> None:
    differing = [
        f"{name} {source.value(name)!r} and here {getattr(config, name)!r}"
        for name in ("task", "head", "l2_normalise")
        if source.value(name) != getattr(config, name)
    ]
    if source.model != config.identity("model"):
        differing.append(f"model {source.value('model')!r} and here {config.model!r}, or other code of it")
    if differing:
        raise UsageError(f"model_weights: {source.name} has {', '.join(differing)}. Give the same as that run has.")


def _seen(run: RunPaths, own: RunConfig, number: int) -> _Seen:
    outcome = read_outcome(run.fold_outcome(number), TrainingRecord)
    if outcome is None or not (run.fold_checkpoints(number) / BEST).is_file():
        raise UsageError(
            f"model_weights: fold {number} of {run.run_id} is not finished, or its {BEST} is gone. Finish that run "
            "first (--resume), or give another one."
        )
    rows = rows_to_train_on(run, own, number)
    split = rows.split(
        number, inner_validation_share=own.inner_validation_share, seed=own.seed, without=outcome.missing
    )
    known = _known(run)
    parts = [
        known.filter(pl.col("video_id").is_in(part["video_id"].to_list())) for part in (split.train, split.validation)
    ]
    before = _source(own)
    if before is not None:
        earlier = before.seen(number % before.num_trainings)
        parts = [part.vstack(other) for part, other in zip(parts, (earlier.trained, earlier.chosen_on), strict=True)]
    return _Seen(*parts)


def _is_split_later(source: _Run | _Bundle, number: int) -> bool:
    """Whether the weights were split (``tune effort``) after an own run had trained them as they were."""
    before = source.before
    if before is None or not OwnWeights(source.weights(number), "", "").is_split:
        return False
    number %= before.num_trainings
    return not OwnWeights(before.weights(number), "", "").is_split or _is_split_later(before, number)


def _known(run: RunPaths) -> pl.DataFrame:
    """Columns video_id, fold, group (with the run's name), content_sha256 and perceptual_hash, of all videos.

    The fold is -1 where the run's protocol never tests the video; it may have trained all the same.
    """
    group = pl.format("{} {}", pl.lit(run.run_id), "group_id")
    index = read_table(run.index, INDEX).select("video_id", "content_sha256", "perceptual_hash", group=group)
    folds = read_table(run.folds, FOLDS).select("video_id", "fold")
    known = index.join(folds, on="video_id", how="left").with_columns(pl.col("fold").fill_null(-1))
    return known.select("video_id", "fold", "group", "content_sha256", "perceptual_hash").sort("video_id")


def _num_alike(known: pl.DataFrame, counted: pl.Series, seen: pl.DataFrame, max_bits: int) -> int:
    """How many of ``known`` that are ``counted`` are connected with one of ``seen`` by content, looks and groups.

    Others may connect them: a video that takes no part here, of one group with a tested one, may be like one seen.
    """
    all_of_them = known.vstack(seen)
    connected = Components(all_of_them.height)
    for column in ("content_sha256", "group", "video_id"):
        first: dict[str, int] = {}
        for place, value in enumerate(all_of_them[column].to_list()):
            if value is not None:
                connected.join(first.setdefault(value, place), place)
    contents = all_of_them["content_sha256"].fill_null("").to_list()
    for one, other in near_copies(contents, all_of_them["perceptual_hash"].to_list(), max_bits):
        connected.join(one, other)
    labels = connected.label.tolist()
    of_seen = set(labels[known.height :])
    return sum(label in of_seen for label, counts in zip(labels, counted, strict=False) if counts)
