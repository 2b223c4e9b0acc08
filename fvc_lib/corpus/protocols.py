"""Make the protocol table of a run, which states the part (such as train or test) of every video in every training.

A protocol is a rule that divides a corpus into videos that are trained on, tested and left out. A run has one or
several trainings (folds) with different test videos. No protocol tests a video twice. INDEX, FOLDS and PROTOCOL are
tables whose columns ``services.tables`` describes.

``official`` uses the split that the corpus comes with, because published numbers were made with it. If this split
divides a leakage group (videos of the same person or source, near-duplicates), that is a leak. Every row of a divided
group states this as its reason, and ``check_protocol`` tolerates only these groups. ``official_strict`` removes the
leaks: it leaves out validation videos of tested groups, and training videos of tested or validation groups.

``cross_corpus`` trains on some corpora and tests on the others (the targets). A target is tested on its official test
list, or on all its videos if it has none. A training video whose group is also tested is left out.

``leave_one_generator_out`` tests on fakes of a generator that the network never saw in training. Every group is
assigned to one fold, and every fold has a target: the generator that it tests. In its own groups, a fold tests the
real videos and the fakes that the target made. In the groups of the other folds, it trains on all videos except fakes
of the target. Names mean the same generator if they differ only in case or punctuation. A name with ``+`` means that
several generators made the fake. Fakes that share a generator with the target are not trained on. If there are more
folds than generators, the generators with most groups are tested in several folds. If there are fewer folds, only the
generators with most groups are tested.

``leave_one_source_out`` tests every source on models that saw none of it. Sources are corpora, or the values of
another column of the index or manifest (``source_column``). A group with videos of several sources joins these sources.
If there are more sources than folds, a fold tests several.

``length_matched`` and ``metadata_matched`` use videos whose metadata do not reveal the label. This is coarsened exact
matching (S. Iacus, G. King and G. Porro, "Causal inference without balance checking: coarsened exact matching",
Political Analysis 20, 2012): videos are sorted into cells of equal codec and similar length and size, and as many reals
as fakes are taken from each cell. Cells are halved until a classifier that sees only the matched columns is at chance.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import polars as pl

from fvc_lib.corpus.copies.groups import Components
from fvc_lib.corpus.corpus_files import some_of
from fvc_lib.corpus.folds import (
    GENERATORS_DEALT,
    MATCHES_DRAWN,
    TrainingRows,
    check_folds,
    make_folds,
    most_folds,
    refuse_few_groups,
)
from fvc_lib.corpus.index import listed_videos, refuse_empty_index, refuse_unusable
from fvc_lib.corpus.listing import Listing
from fvc_lib.services import tasks as names
from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import DataError, LeakageError, did_you_mean
from fvc_lib.services.tables import FOLDS, LABELS, LEFT_OUT, PARTS, PROTOCOL, check_table

# Protocols that use a file content once if several corpora hold it. The others test a corpus or an official list whole.
_CONTENTS_ONCE = (
    names.KFOLD,
    names.LEAVE_ONE_GENERATOR_OUT,
    names.LEAVE_ONE_SOURCE_OUT,
    names.LENGTH_MATCHED,
    names.METADATA_MATCHED,
)
UNKNOWN = "its generator is not known, so it may be the one held out"
HELD_OUT = "made by the generator held out, and its group is not tested here"
SHARES = "made by several generators, one of which is held out"
OTHER = "its group is tested here, and it is not made by the generator held out"
_NO_SOURCE = "its source is not known, so models may have seen it"
_FEWEST_GROUPS = 2  # a generator is tested only if its fakes are in at least this many groups
LENGTH = ("num_frames", "duration_seconds")
CELLS_PER_OCTAVE = (1, 2, 4, 8, 16, 0)  # numbers of cells per doubling of a value, tried in turn; 0: equal values only
# Largest AUC that counts as chance. The interval alone does not decide: with few videos it always contains 0.5.
_CHANCE = 0.55

# Measures how well metadata predict the label. Arguments: rows of the index, their FOLDS table, and names of columns.
# Returns the AUC of a classifier that sees these columns only, and the low end of its confidence interval. Both are
# None if they cannot be computed.
Tells = Callable[[pl.DataFrame, pl.DataFrame, tuple[str, ...]], tuple[float | None, float | None]]


def _connected(table: pl.DataFrame, one: str, other: str) -> pl.Series:
    """Return for each of N rows the number of its connected component, as text.

    Two rows are connected if they have equal values in at least one of the two columns. Rows that are connected through
    other rows are in the same component, too.

    Args:
        table: N rows.
        one: name of a column, from whose values the components are numbered.
        other: name of the other column.
    """
    first, second = (table[name].rank("dense").cast(pl.Int64) - 1 for name in (one, other))
    num_first = first.n_unique()
    components = Components(num_first + second.n_unique())
    for pair in zip(first, second + num_first, strict=True):
        components.join(*pair)
    return pl.Series(components.label).gather(first).cast(pl.String)


# --- Protocols with a single training, fold 0: official splits and cross_corpus.


def _with_parts(rows: pl.DataFrame, is_tested: pl.Expr, reason: pl.Expr) -> pl.DataFrame:
    """Return ``rows`` with the additional columns ``part`` (train, test or left_out) and ``reason``.

    A row with a reason has the part left_out.

    Args:
        rows: one row for each video and training.
        is_tested: expression; true for rows that are tested if they have no reason. The other rows are trained on.
        reason: expression for the reason why a row is left out, or null.
    """
    part = pl.when(reason.is_not_null()).then(pl.lit(LEFT_OUT)).when(is_tested).then(pl.lit("test"))
    return rows.with_columns(part=part.otherwise(pl.lit("train")), reason=reason)


def _official(index: pl.DataFrame, *, strict: bool) -> pl.DataFrame:
    """Return ``index`` with the additional columns fold, part, reason and target, by the corpus's official split.

    ``fold`` is 0, the only training. ``part`` is train, validation, test or left_out. ``reason`` says why a video is
    left out or leaks, else null. ``target`` is ``official test`` for tested videos, else null. With ``strict``, videos
    that would leak are left out (protocol ``official_strict``).

    Raises:
        DataError: the corpus has no official split, or the split has no training or no test part.
    """
    parts = set(index["official_split"].drop_nulls())
    if not {"train", "test"} <= parts:
        raise DataError(
            f"protocol official: wanted a corpus with a split of its own into train and test, got the parts "
            f"{some_of(sorted(parts)) or 'none'}. Give a manifest with a column split, or use -p protocol kfold."
        )
    part = pl.col("official_split")
    of_group = part.drop_nulls().unique().sort().over("group_id", mapping_strategy="join")
    is_tested = of_group.list.contains("test")
    is_validated = of_group.list.contains("validation")
    leaks = part.is_not_null() & (of_group.list.len() > 1)
    if strict:
        leaks = is_tested & part.is_in(["train", "validation"]) | is_validated & (part == "train")
    named = pl.format("its group is in several official parts: {}", of_group.list.join(", "))
    unnamed = pl.when(part.is_null()).then(pl.lit("the corpus's own split does not name it"))
    reason = unnamed.when(leaks).then(named)
    part = (pl.when(~leaks).then(part) if strict else part).fill_null(LEFT_OUT)
    target = pl.when(part == "test").then(pl.lit("official test"))
    return index.with_columns(fold=pl.lit(0, pl.Int64), part=part, reason=reason, target=target)


def refused_targets(targets: Sequence[str], corpora: Sequence[str]) -> str:
    """Return an error message if ``targets`` cannot be the tested corpora of a run on ``corpora``; else an empty text.

    A target must be among ``corpora``, and at least one corpus must be left to train on.
    """
    if unknown := [name for name in targets if name not in corpora]:
        near = did_you_mean(unknown[0], corpora)
        listed = some_of(list(corpora)) or "one without a name"
        return f"target_corpora: {unknown[0]!r} is none of this run's corpora.{near} They are: {listed}."
    if set(corpora) <= set(targets):
        return (
            f"target_corpora: {some_of(list(targets))} are all of this run's corpora, and nothing is left to train on. "
            "Leave one out, or give another with -p more_corpora."
        )
    return ""


def _cross_corpus(index: pl.DataFrame, targets: Sequence[str]) -> pl.DataFrame:
    """Return ``index`` with the additional columns fold, part, reason and target, by the protocol ``cross_corpus``.

    The corpora ``targets`` are tested and the others trained on. ``fold`` is 0, the only training. ``part`` is train,
    test or left_out. ``reason`` says why a video is left out, else null. ``target`` is the corpus of a tested video,
    else null.

    Raises:
        DataError: a target is no corpus of the run or lacks a label, or no corpus is left to train on.
    """
    if why := refused_targets(targets, sorted(index["corpus"].drop_nulls().unique())):
        raise DataError(f"{why} A new run can keep the work of this one: --resume RUN --fork -p target_corpora NAME.")
    is_target = pl.col("corpus").is_in(list(targets)).fill_null(value=False)
    listed = (pl.col("official_split") == "test").fill_null(value=False)
    is_tested = is_target & (listed | ~listed.any().over("corpus"))
    target = pl.when(is_tested).then("corpus")
    rows = index.with_columns(fold=pl.lit(0, pl.Int64), is_tested=is_tested, target=target)
    crosses = ~is_target & pl.col("is_tested").any().over("group_id")
    unlisted = pl.lit("not in its corpus's official test list")
    crossing = pl.when(crosses).then(pl.lit("its group is also tested"))
    reason = crossing.when(is_target & ~pl.col("is_tested")).then(unlisted)
    rows = _with_parts(rows, pl.col("is_tested"), reason)
    for name in targets:
        if lacking := sorted(set(LABELS) - set(rows.filter(target=name)["label"])):
            raise DataError(
                f"target_corpora: {name!r} has no {some_of(lacking)} videos to test on. Add them, or leave it out."
            )
    return rows


# --- The protocol leave_one_generator_out.


def _plain(name: str) -> str:
    """Return a generator's name in lower case without punctuation, to compare names; parts between ``+`` are sorted.

    For example, ``Wav2Lip+Face-Swap`` becomes ``faceswap+wav2lip``.
    """
    parts = {"".join(filter(str.isalnum, part.casefold())) for part in name.split("+")} - {""}
    return "+".join(sorted(parts)) or name


def _generators(index: pl.DataFrame) -> pl.DataFrame:
    """Return a table ``video_id group_id label spelled plain generator`` of the INDEX table, sorted by video.

    The last three columns name the generator that made a fake, and are null for reals. ``spelled`` is the name in the
    index: the generator, else the manipulation. ``plain`` is this name without case and punctuation. ``generator`` is
    the most frequent spelling among the videos with equal ``plain``.
    """
    made = pl.coalesce("generator", "manipulation") if "generator" in index.columns else pl.col("manipulation")
    spelled = pl.when(pl.col("label") == "fake").then(made)
    videos = index.select("video_id", "group_id", "label", spelled=spelled).sort("video_id")
    names_of = {name: _plain(name) for name in videos["spelled"].drop_nulls().unique()}
    plain = pl.col("spelled").replace_strict(names_of, default=None, return_dtype=pl.String)
    return videos.with_columns(plain=plain).with_columns(
        generator=pl.col("spelled").drop_nulls().mode().min().over("plain")
    )


def held_out(index: pl.DataFrame, num_folds: int) -> list[str]:
    """Return the target of each fold, a list of ``num_folds`` names of generators.

    The target is the generator whose fakes are tested and not trained on. Generators with most groups come first. If
    there are more folds than generators, generators with many groups are the target of several folds.

    Raises:
        DataError: there are fewer than two generators, or their fakes are in too few groups for ``num_folds``.
    """
    counts = _generators(index).drop_nulls("generator").group_by("generator").agg(pl.col("group_id").n_unique())
    usable = counts.filter(pl.col("group_id") >= _FEWEST_GROUPS)
    usable = usable.sort(["group_id", "generator"], descending=[True, False])
    groups_of = dict(usable.head(num_folds).iter_rows())
    if counts.height < 2 or sum(groups_of.values()) < num_folds:
        named = some_of(counts["generator"].sort().to_list()) or "none"
        raise DataError(
            f"protocol leave_one_generator_out: got {counts.height} generators ({named}) for {num_folds} folds; wanted "
            f"at least two, and a group for every fold (a generator counts with {_FEWEST_GROUPS} groups or more). Name "
            "the maker of each fake in a manifest's column generator, or use -p protocol kfold."
        )
    folds = dict.fromkeys(groups_of, 1)
    while sum(folds.values()) < num_folds:
        folds[max(groups_of, key=lambda name: (folds[name] < groups_of[name], groups_of[name] / folds[name]))] += 1
    return [name for name, count in folds.items() for _ in range(count)]


def _leave_one_generator_out(index: pl.DataFrame, num_folds: int, seed: int) -> pl.DataFrame:
    """Return the part of every video in every training, by the protocol ``leave_one_generator_out``.

    The table has one row per video and fold, with (among others) the columns ``video_id group_id label fold target part
    reason``. ``part`` is train, test or left_out; ``reason`` says why a video is left out, else null.

    Raises:
        DataError: there are fewer than two generators, or fewer groups of fakes or of reals than needed for the folds.
    """
    targets = held_out(index, num_folds)
    videos = _generators(index)
    fold_of = _deal(videos, targets, seed)
    plain_of = dict(videos.select("generator", "plain").iter_rows())
    held = [plain_of[target].split("+") for target in targets]
    trainings = pl.DataFrame({"fold": range(len(targets)), "target": targets, "held": held})
    rows = videos.join(trainings.cast({"fold": pl.Int64}), how="cross")
    home = pl.col("group_id").replace_strict(fold_of, return_dtype=pl.Int64)
    here = home == pl.col("fold")
    is_fake = pl.col("label") == "fake"
    made_by_target = pl.col("generator") == pl.col("target")
    is_target = made_by_target.fill_null(value=False)
    makers = pl.col("plain").str.split("+")
    num_shared = makers.list.set_intersection("held").list.len()
    shares = num_shared.fill_null(0) > 0
    reason = (
        pl.when(is_fake & pl.col("generator").is_null()).then(pl.lit(UNKNOWN))
        .when(here & is_fake & ~is_target).then(pl.lit(OTHER))
        .when(~here & is_target).then(pl.lit(HELD_OUT))
        .when(~here & shares).then(pl.lit(SHARES))
    )  # fmt: skip
    return _with_parts(rows, here, reason)


def _deal(videos: pl.DataFrame, targets: Sequence[str], seed: int) -> Mapping[str, int]:
    """Assign every group to a fold; return a mapping from group id to the number of the fold.

    Every fold tests the fakes of one generator, its target. A group with fakes of a target can only go to the folds
    with this target. Any other group can go to every fold.

    Groups are assigned one after the other: those with the fewest possible folds first, and among these the groups with
    most videos. A group with reals goes to the possible fold that has the fewest groups with reals so far. A group
    without reals goes to the possible fold in which fewest groups have fakes of the fold's target so far.

    Args:
        videos: table of ``_generators``.
        targets: the generator that each fold tests.
        seed: decides the order of groups of equal size.

    Raises:
        DataError: fewer groups with real videos, or with fakes, than folds.
    """
    is_real = pl.col("label") == "real"
    makers = pl.col("generator").drop_nulls()
    groups = videos.group_by("group_id").agg(reals=is_real.sum(), made=makers.unique(), size=pl.len())
    generator = np.random.default_rng([seed, GENERATORS_DEALT])
    drawn = generator.permutation(groups.height)
    groups = groups.sort("group_id").with_columns(drawn=drawn)
    refuse_few_groups(videos, len(targets))
    reals = [0] * len(targets)
    fakes = [0] * len(targets)
    fold_of: dict[str, int] = {}
    rows = []
    for group, num_reals, made, size, place in groups.iter_rows():
        fitting = [fold for fold, target in enumerate(targets) if target in made]
        rows.append((len(fitting) or len(targets) + 1, -size, place, group, num_reals, fitting))
    for *_, group, num_reals, fitting in sorted(rows):
        load = reals if num_reals else fakes
        fold = min(fitting or range(len(targets)), key=lambda fold: (load[fold], fakes[fold], fold))
        fold_of[group] = fold
        reals[fold] += num_reals > 0
        fakes[fold] += bool(fitting)
    return fold_of


# --- The protocols with matched metadata, and kfold.


def _matched(index: pl.DataFrame, protocol: str, num_folds: int, seed: int, tells: Tells) -> pl.DataFrame:
    """Return the part of every video in every training; as many reals as fakes of similar metadata are used.

    The table has one row per video and fold, with the columns ``video_id group_id label home fold part target reason``
    (see ``_parts_of_folds``). Videos that are not matched are left out.

    Args:
        index: INDEX table.
        protocol: ``length_matched`` or ``metadata_matched``; decides which columns are matched.
        num_folds: number of folds.
        seed: decides which of several videos with similar metadata are used, and the folds.
        tells: measures how well the matched columns predict the label; see ``Tells``.

    Raises:
        DataError: too few reals and fakes have similar metadata, or the matched columns still reveal the label.
    """
    columns = LENGTH if protocol == names.LENGTH_MATCHED else (*LENGTH, "codec", "width", "height")
    for cells in CELLS_PER_OCTAVE:
        chosen = matched_videos(index, columns, cells, seed)
        if most_folds(chosen) < num_folds:
            break
        taken = index.join(chosen, on="video_id", how="semi", maintain_order="left")
        folds = _fold_pairs(chosen, num_folds, seed)
        value, low = tells(taken, folds, columns)
        if low is None or value is None or (low <= 0.5 and (cells == 0 or value <= _CHANCE)):
            return _parts_of_folds(index, folds, num_folds)
    raise DataError(
        f"protocol {protocol}: {chosen.height} videos in {most_folds(chosen)} groups of the rarer label are left where "
        f"{', '.join(columns)} do not tell reals and fakes apart; wanted {num_folds} groups. Cut or re-encode the "
        "videos alike, set num_folds lower, or use -p protocol kfold."
    )


def _fold_pairs(chosen: pl.DataFrame, num_folds: int, seed: int) -> pl.DataFrame:
    """Divide matched videos into folds, with matched pairs (a real and a similar fake) in the same fold.

    The two videos of a pair have similar metadata and opposite labels. If they were in two folds, a model that learns
    the metadata and label of one would predict the wrong label for the other. If pairs connect so many groups that
    folds would be uneven, pairs may be separated; groups never are.

    Args:
        chosen: table ``video_id group_id label pair`` of ``matched_videos``.
        num_folds: number of folds.
        seed: chooses between equally good folds.

    Returns:
        FOLDS table, sorted by video.
    """
    together = chosen.with_columns(group_id=_connected(chosen, "group_id", "pair"))
    largest = together.group_by("group_id").len()["len"].to_list()
    if most_folds(together) < num_folds or max(largest) > chosen.height / num_folds:
        return make_folds(chosen, num_folds, seed)
    dealt = make_folds(together, num_folds, seed).drop("group_id")
    return dealt.join(chosen.select("video_id", "group_id"), on="video_id").select(*FOLDS.columns).sort("video_id")


def matched_videos(index: pl.DataFrame, columns: tuple[str, ...], cells: int, seed: int) -> pl.DataFrame:
    """Choose as many reals as fakes from every cell; a cell holds the videos with similar values in ``columns``.

    Videos are drawn at random. But a second video of a group is drawn only after one video of every group in the cell,
    so that many groups occur.

    Args:
        index: INDEX rows.
        columns: the columns to match.
        cells: number of cells per doubling of a value; 0: only equal values share a cell.
        seed: decides the draw.

    Returns:
        Table ``video_id group_id label pair``, sorted by video; a real and a fake of equal ``pair`` are matched.
    """
    cell = []
    for name in columns:
        is_exact = name == "codec" or not cells
        value = pl.col(name) if is_exact else (pl.col(name).cast(pl.Float64).log(2) * cells).floor()
        cell.append(value.cast(pl.String).fill_null("not known"))
    generator = np.random.default_rng([seed, MATCHES_DRAWN])
    drawn = pl.Series("drawn", generator.permutation(index.height))
    known = index.sort("video_id").with_columns(drawn, cell=pl.concat_str(cell, separator="|"))
    in_group = pl.col("drawn").rank("ordinal").over("cell", "label", "group_id")
    known = known.with_columns(in_group=in_group)
    order = pl.struct("in_group", "drawn").rank("ordinal").over("cell", "label")
    known = known.with_columns(order=order)
    of_label = [(pl.col("label") == label).sum().over("cell") for label in LABELS]
    wanted = pl.min_horizontal(*of_label)
    taken = known.filter(pl.col("order") <= wanted).sort("video_id")
    return taken.select("video_id", "group_id", "label", pair=pl.format("{} {}", "cell", "order"))


def _parts_of_folds(index: pl.DataFrame, folds: pl.DataFrame, num_folds: int) -> pl.DataFrame:
    """Return a table ``video_id group_id label home fold part target reason`` with one row per video and training.

    ``home`` is the fold of the video in ``folds``, ``fold`` the number of the training. A training tests the videos
    whose home is its fold and trains on the others. Videos that are not in ``folds`` are left out of all trainings.
    """
    trainings = pl.DataFrame({"fold": range(num_folds)}, schema={"fold": pl.Int64})
    rows = index.select("video_id", "group_id", "label", target=pl.lit(None, pl.String))
    rows = rows.join(folds.select("video_id", home="fold"), on="video_id", how="left").join(trainings, how="cross")
    reason = pl.when(pl.col("home").is_null()).then(pl.lit("no video of the other label is left that is like it"))
    return _with_parts(rows, pl.col("home") == pl.col("fold"), reason)


# --- The protocol leave_one_source_out.


def source_expression(index: pl.DataFrame, column: str) -> pl.Expr:
    """Return a polars expression for the source of each video, as text.

    The source is the value of ``column`` in the table ``index``. If the table has no such column, the value is read
    from its column ``attributes``, JSON text with the further columns of the corpus's manifest.
    """
    if column in index.columns:
        return pl.col(column).cast(pl.String)
    return pl.col("attributes").str.json_path_match(f"$['{column}']")


def separate_sources(index: pl.DataFrame, column: str) -> pl.DataFrame:
    """Return a table ``video_id label group_id`` of the videos whose source is known, sorted by video.

    Here ``group_id`` is the number of the video's source, as text. Sources count as one source if a leakage group has
    videos of both.

    Args:
        index: INDEX table.
        column: column of ``index``, or of the corpus's manifest, that names the source of each video.

    Raises:
        DataError: there are fewer than two sources.
    """
    known = index.select("video_id", "group_id", "label", source=source_expression(index, column))
    known = known.drop_nulls("source").sort("video_id")
    sources = known["source"].unique().sort().to_list()
    if len(sources) < 2:
        raise DataError(
            f"protocol leave_one_source_out: got the sources {some_of(sources) or 'none'} in column {column!r}; wanted "
            "two or more. Add corpora (-p more_corpora), or name a column of the manifest (-p source_column NAME)."
        )
    return known.select("video_id", "label", group_id=_connected(known, "source", "group_id"))


def _leave_one_source_out(index: pl.DataFrame, column: str, num_folds: int, seed: int) -> pl.DataFrame:
    """Return the part of every video in every training, by the protocol ``leave_one_source_out``.

    The table has one row per video and training, with the columns ``video_id group_id label home fold part target
    reason``. ``home`` is the training that tests the video. Videos without a source are left out. ``target`` is null,
    since a fold may test several sources.

    Args:
        index: INDEX table.
        column: column of the index or of the manifest that names the source of each video.
        num_folds: number of folds.
        seed: chooses between equally good folds.

    Raises:
        DataError: there are fewer separate sources of a label than folds.
    """
    sources = separate_sources(index, column)
    refuse_few_groups(sources, num_folds, f"separate sources (column {column!r})")
    rows = _parts_of_folds(index, make_folds(sources, num_folds, seed), num_folds)
    return rows.with_columns(reason=pl.when(pl.col("home").is_null()).then(pl.lit(_NO_SOURCE)))


# --- The table of a run.


def make_protocol(index: pl.DataFrame, config: RunConfig, tells: Tells) -> pl.DataFrame:
    """Return the PROTOCOL table: the part of every video of the index in every training of ``config.protocol``.

    Rows are sorted by training and video; they do not depend on the order of the index.

    Args:
        index: INDEX table.
        config: uses protocol, target_corpora, source_column, num_folds, and folds_seed (or seed if that is None).
        tells: measures how well columns of the index predict the label; see ``Tells``.

    Raises:
        DataError: the corpus does not fit the protocol; the message says what is missing.
        LeakageError: a training would both train and test on a group.
    """
    refuse_empty_index(index)
    name = config.protocol
    num_folds = config.num_folds
    whole = index
    if name in _CONTENTS_ONCE:
        index = whole.sort("video_id").unique("content_sha256", keep="first", maintain_order=True)
    seed = config.seed if config.folds_seed is None else config.folds_seed
    if name in (names.OFFICIAL, names.OFFICIAL_STRICT):
        rows = _official(index, strict=name == names.OFFICIAL_STRICT)
    elif name == names.CROSS_CORPUS:
        rows = _cross_corpus(index, config.target_corpora)
    elif name == names.LEAVE_ONE_GENERATOR_OUT:
        rows = _leave_one_generator_out(index, num_folds, seed)
    elif name == names.LEAVE_ONE_SOURCE_OUT:
        rows = _leave_one_source_out(index, config.source_column, num_folds, seed)
    elif name in (names.LENGTH_MATCHED, names.METADATA_MATCHED):
        rows = _matched(index, name, num_folds, seed, tells)
    else:
        rows = _parts_of_folds(index, make_folds(index, num_folds, seed), num_folds)
    columns = ("video_id", "group_id", "label", "fold", "target", "part", "reason")
    left = whole.join(index, on="video_id", how="anti")
    copies = left.join(rows.select("fold").unique(), how="cross")
    reason = pl.lit("the same file content as another corpus's, which takes part")
    copies = copies.with_columns(part=pl.lit(LEFT_OUT), reason=reason, target=pl.lit(None, pl.String))
    table = pl.concat([rows.select(columns), copies.select(columns)])
    table = table.with_columns(protocol=pl.lit(name))
    table = table.select(*PROTOCOL.columns).sort("fold", "video_id")
    check_protocol(table, whole)
    return check_table(table, PROTOCOL, "protocol")


def refuse_untrainable(listing: Listing, config: RunConfig) -> None:
    """Raise ``DataError`` early, before any video is opened, for corpora that cannot be trained on.

    The index can only have fewer videos and groups than the listing. So a run would fail later for the same reason.

    Raises:
        DataError: no file is usable, all have the same label, too many are lost, or there are too few groups for the
            protocol.
    """
    if config.annotations_only:
        return
    videos = listed_videos(listing)
    refuse_unusable(listing, videos, listing.rejected, config.max_rejected_share)
    if config.protocol in (names.OFFICIAL, names.OFFICIAL_STRICT):
        _official(videos, strict=False)
    elif config.protocol not in (names.CROSS_CORPUS, names.LEAVE_ONE_GENERATOR_OUT, names.LEAVE_ONE_SOURCE_OUT):
        refuse_few_groups(videos, config.num_folds)


def check_protocol(table: pl.DataFrame, index: pl.DataFrame) -> None:
    """Check that no group is in two parts of a training, every training lists all videos, and none is tested twice.

    Under the protocol ``official``, groups that the official split divides may be in two parts.

    Args:
        table: PROTOCOL table.
        index: INDEX table with all videos.

    Raises:
        LeakageError: a group or video is in two parts of a training, or two trainings test the same video.
        DataError: a training does not list all videos, or trains or tests on a single label.
    """
    videos = index["video_id"].sort().to_list()
    for fold, rows in _by_training(table):
        side = pl.col("part").replace_strict({part: number for number, part in enumerate(PARTS)})
        sides = rows.filter(pl.col("part") != LEFT_OUT).with_columns(fold=side)
        check_folds(sides, training_rows(table, fold).leaking)
        if rows["video_id"].sort().to_list() != videos:
            raise DataError(f"protocol: training {fold} has not one row for each video. Make the folds again.")
        for part in ("train", "test"):
            of_part = rows.filter(part=part)
            if lacking := sorted(set(LABELS) - set(of_part["label"])):
                raise DataError(
                    f"protocol: training {fold} has no {some_of(lacking)} among the {of_part.height} videos of its "
                    f"{part} part. Add such videos, set num_folds lower, or use another protocol."
                )
    tested = table.filter(part="test")["video_id"]
    twice = tested.filter(tested.is_duplicated()).to_list()
    if twice:
        raise LeakageError(f"protocol: videos are tested by several trainings: {some_of(twice)}.")


def _by_training(table: pl.DataFrame) -> list[tuple[int, pl.DataFrame]]:
    return [(int(rows["fold"][0]), rows) for rows in table.partition_by("fold", maintain_order=True)]


def folds_tested(table: pl.DataFrame) -> pl.DataFrame:
    """Return the FOLDS table of all tested videos, sorted by ``video_id``.

    ``table`` is a PROTOCOL table. ``fold`` is the number of the training that tests the video.
    """
    return table.filter(pl.col("part") == "test").select(*FOLDS.columns).sort("video_id")


def training_rows(table: pl.DataFrame, fold: int) -> TrainingRows:
    """Return the videos that training ``fold`` uses, as ``TrainingRows``.

    The method ``TrainingRows.split(fold)`` then divides them into training, validation and test. It tests the videos
    whose fold number is ``fold``. So this function gives the number ``fold`` to the tested videos, and ``fold + 1`` to
    all others.

    Args:
        table: PROTOCOL table, with the part of every video in every training.
        fold: number of the training.
    """
    rows = table.filter((pl.col("fold") == fold) & (pl.col("part") != LEFT_OUT))
    number = pl.when(pl.col("part") == "test").then(fold).otherwise(fold + 1)
    is_leaking = (pl.col("protocol") == names.OFFICIAL) & pl.col("reason").is_not_null()
    leaking = rows.filter(is_leaking)["group_id"]
    numbered = rows.with_columns(fold=number.cast(pl.Int64)).select(*FOLDS.columns)
    validation = rows.filter(pl.col("part") == "validation")["video_id"]
    return TrainingRows(numbered.sort("video_id"), frozenset(validation), frozenset(leaking))


def all_rows(table: pl.DataFrame) -> TrainingRows:
    """Return all videos that any training of a run uses, for a final training without a test part.

    ``table`` is the run's PROTOCOL table. In the result all videos have fold 0.
    """
    rows = table.filter(pl.col("part") != LEFT_OUT).unique("video_id").with_columns(fold=pl.lit(0, pl.Int64))
    return TrainingRows(rows.select(*FOLDS.columns).sort("video_id"))


def sentence(table: pl.DataFrame) -> str:
    """Return a sentence that names and explains the protocol of a run, and states the number of tested videos.

    ``table`` is the run's PROTOCOL table.
    """
    name = table["protocol"][0]
    tested = folds_tested(table).height
    all_videos = table["video_id"].n_unique()
    return f"{name}: {names.PROTOCOLS[name].meaning}. {tested} of {all_videos} videos are tested."


def parts_table(table: pl.DataFrame, config: RunConfig) -> pl.DataFrame:
    """Return a table ``fold target train validation test left_out`` with one row per training of a PROTOCOL table.

    ``target`` names what the training tests: a generator, corpora or ``official test``; it is empty for other
    protocols. The last four columns are numbers of videos. ``config`` states the share of validation and the seed.

    Raises:
        DataError: there are too few groups for a validation part.
    """
    rows, share = [], config.inner_validation_share
    for fold, part in _by_training(table):
        split = training_rows(table, fold).split(fold, inner_validation_share=share, seed=config.seed)
        targets = ", ".join(part["target"].drop_nulls().unique().sort())
        left_out = int((part["part"] == LEFT_OUT).sum())
        sizes = (split.train.height, split.validation.height, split.test.height)
        rows.append((fold, targets, *sizes, left_out))
    return pl.DataFrame(rows, schema=["fold", "target", *PARTS, LEFT_OUT], orient="row")


def left_out_table(table: pl.DataFrame) -> pl.DataFrame:
    """Count the left-out and leaking videos, and their groups; return a table ``reason label videos groups``.

    ``table`` is a PROTOCOL table. The result has one row per reason and label. A video that has the same reason in
    several trainings is counted once.
    """
    return (
        table.drop_nulls("reason")
        .group_by("reason", "label")
        .agg(videos=pl.col("video_id").n_unique(), groups=pl.col("group_id").n_unique())
        .sort("reason", "label")
    )


def official_leaks(index: pl.DataFrame) -> pl.DataFrame:
    """Return a table ``group_id train validation test paths`` of the leakage groups that the official split divides.

    ``train``, ``validation`` and ``test`` are numbers of videos. ``paths`` names up to four videos of the group with
    their parts. The table is empty if there is no official split.
    """
    counts = ((pl.col("official_split") == part).sum().cast(pl.Int64).alias(part) for part in PARTS)
    known = index.drop_nulls("official_split").sort("official_split", "path")
    paths = pl.format("{} ({})", "path", "official_split").head(4).str.join(", ")
    known = known.group_by("group_id").agg(*counts, paths=paths)
    num_parts = pl.sum_horizontal(pl.col(part) > 0 for part in PARTS)
    return known.filter(num_parts > 1).sort("group_id")
