"""Figures of a corpus: labels by platform and property, sizes of groups, and folds."""

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.wording import count_text

_MOST_VALUES, _MOST_PLATFORMS, _MOST_LABELS = 14, 12, 4
_OTHER_COLORS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9")  # of labels that no network is trained on
_GROUP_COLORS = {
    "real only": theme.REAL, "fake only": theme.FAKE, "real and fake": theme.MODEL, "neither": theme.CONTROL,
}  # fmt: skip


def _or_other(column: str, names: list[str], other: str) -> pl.Expr:
    return pl.when(pl.col(column).is_in(names)).then(column).otherwise(pl.lit(other)).alias(column)


def index_overview_figure(counts: pl.DataFrame, by: str) -> go.Figure:
    """Return a bar chart of the number of videos by label and one property; rare values are summed as "other".

    Args:
        counts: rows of ``queries.index_counts`` with ``value label num_videos``.
        by: name of the property.
    """
    if counts.is_empty():
        return theme.nothing_to_show(f"Videos by {by}", "The index has no videos yet.")
    number = pl.col("num_videos")
    totals = counts.group_by("value").agg(number.sum()).sort("num_videos", "value", descending=[True, False])
    names = totals["value"].head(_MOST_VALUES).to_list()
    merged = counts.group_by(_or_other("value", names, "other"), "label").agg(number.sum())
    # The share of these videos right by guessing each value's more frequent label. It describes the sample and tests
    # nothing: the metadata-only control is the test.
    total = int(counts["num_videos"].sum())
    by_value = int(counts.group_by("value").agg(number.max())["num_videos"].sum()) / total
    per_label = dict(counts.group_by("label").agg(number.sum()).iter_rows())
    return theme.bar_chart(
        f"Knowing the {by} raises a guess of the label from {max(per_label.values()) / total:.0%} to {by_value:.0%} of "
        "these videos",
        theme.by_label(per_label.get("real", 0), per_label.get("fake", 0)),
        merged,
        theme.LABEL_COLORS,
        names=names + ["other"] * (totals.height > len(names)),
        titles=(by.capitalize(), "Videos"),
    )


def fold_balance_figure(balance: pl.DataFrame) -> go.Figure:
    """Return a bar chart of the number of videos in each outer fold by label.

    ``balance`` holds the rows of ``queries.fold_balance``.
    """
    if balance.is_empty():
        return theme.nothing_to_show("Folds", "No folds are recorded yet.")
    number = pl.col("num_videos")
    fakes = number.filter(label="fake").sum()
    folds = balance.group_by("fold").agg(fakes=fakes, share=fakes / number.sum(), all=number.sum()).sort("fold")
    low, high = (f"{share:.0%}" for share in folds["share"].sort()[[0, -1]])
    num_fakes, num_videos = int(folds["fakes"].sum()), int(folds["all"].sum())
    drawn = theme.bar_chart(
        f"Each fold holds {low if low == high else f'{low} to {high}'} fakes",
        f"{theme.by_label(num_videos - num_fakes, num_fakes)}; {count_text(folds.height, 'fold')}",
        balance.select(pl.format("fold {}", "fold"), "label", "num_videos"),
        theme.LABEL_COLORS,
        names=[f"fold {fold}" for fold in folds["fold"]],
        titles=("Outer fold", "Videos"),
        upright=True,
    )
    return drawn.update_layout(barmode="group")


def label_kinds_figure(annotations: pl.DataFrame) -> go.Figure:
    """Return a bar chart of the rows of the label tables by platform and label.

    It includes labels other than real and fake, which no network is trained on.
    """
    if annotations.is_empty():
        return theme.nothing_to_show("Labels by platform", "The label tables hold no row.")
    shown = annotations.select(pl.col("platform").fill_null("not stated"), pl.col("label").fill_null("no label"))
    fake, real = (int((shown["label"] == label).sum()) for label in ("fake", "real"))
    unused = theme.commonest(shown["label"].filter(~shown["label"].is_in(["fake", "real"])), _MOST_LABELS)
    colors = theme.LABEL_COLORS | dict(zip(unused, _OTHER_COLORS, strict=False))
    platforms = theme.commonest(shown["platform"], _MOST_PLATFORMS)
    others = (_or_other(*of, "all others") for of in (("platform", platforms), ("label", list(colors))))
    counts = shown.with_columns(*others).group_by("platform", "label").len()
    neither = annotations.height - fake - real
    rest = f"; {neither:,} neither, which are kept out of training" if neither else ""
    present = annotations.filter("is_present")["source_id"].n_unique()
    return theme.bar_chart(
        f"{count_text(fake, 'row')} labelled fake and {real:,} labelled real{rest}",
        f"n = {count_text(annotations.height, 'row')} of {count_text(annotations['source_id'].n_unique(), 'source')}; "
        f"{present:,} of the sources {'has a file' if present == 1 else 'have a file'} here",
        counts,
        {**colors, "all others": theme.CONTROL},
        names=platforms + ["all others"] * ("all others" in counts["platform"]),
        titles=("Platform", "Rows of the label tables"),
    )


def group_sizes_figure(members: pl.DataFrame, *, members_are: str = "video") -> go.Figure:
    """Return a bar chart of the number of groups by size (1, 2 to 3, 4 to 7, ...) and by the labels of their members.

    Args:
        members: one row per member of a group, with ``group_id label``.
        members_are: name of a member in the singular, such as ``video``.
    """
    if members.is_empty():
        return theme.nothing_to_show("Sizes of the groups", f"There is no {members_are} yet.")
    real, fake = ((pl.col("label") == label).any() for label in ("real", "fake"))
    groups = members.group_by("group_id").agg(
        pl.len().alias("size"),
        kind=pl.when(real & fake).then(pl.lit("real and fake"))
        .when(real).then(pl.lit("real only"))
        .when(fake).then(pl.lit("fake only"))
        .otherwise(pl.lit("neither")),
    )  # fmt: skip
    steps = [size.bit_length() - 1 for size in groups["size"]]
    names = ["1", *(f"{1 << step} to {(2 << step) - 1}" for step in range(1, max(steps) + 1))]
    sizes = groups["size"].sort(descending=True)
    half = (sizes.cum_sum() < sizes.sum() / 2).sum() + 1
    finding = f"Half of all {members_are}s are in the {half:,} largest of {groups.height:,} groups"
    if half == 1:
        finding = f"The largest group alone holds {sizes[0] / sizes.sum():.0%} of all {members_are}s"
    return theme.bar_chart(
        finding,
        f"n = {count_text(groups.height, 'group')} of {count_text(members.height, members_are)}; "
        "a group stays whole in every split",
        groups.with_columns(size=pl.Series([names[step] for step in steps])).group_by("size", "kind").len(),
        _GROUP_COLORS,
        names=names,
        titles=(f"{members_are.capitalize()}s in the group", "Groups"),
        upright=True,
    )
