"""Figures of a corpus: labels by platform and property, sizes of groups, links between groups, and folds."""

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.wording import count_text

_MOST_VALUES, _MOST_PLATFORMS, _MOST_LABELS = 14, 12, 4
_OTHER_COLORS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9")  # of labels that no network is trained on
_GROUP_COLORS = {
    "real only": theme.REAL, "fake only": theme.FAKE, "real and fake": theme.MODEL, "neither": theme.CONTROL,
}  # fmt: skip


def index_overview_figure(counts: pl.DataFrame, by: str) -> go.Figure:
    """Return videos by label and one property; rare values are added up as "other".

    Args:
        counts: of ``queries.index_counts``: ``value label num_videos``.
        by: name of the property.
    """
    if counts.is_empty():
        return theme.nothing_to_show(f"Videos by {by}", "The index has no videos yet.")
    totals = counts.group_by("value").agg(pl.col("num_videos").sum())
    totals = totals.sort("num_videos", "value", descending=[True, False])
    names = totals["value"].head(_MOST_VALUES).to_list()
    known = pl.when(pl.col("value").is_in(names)).then("value").otherwise(pl.lit("other"))
    merged = counts.group_by(known.alias("value"), "label").agg(pl.col("num_videos").sum())
    if totals.height > len(names):
        names.append("other")
    # The share of these videos right by guessing each value's more frequent label. It describes the sample and tests
    # nothing: the metadata-only control is the test.
    total = int(counts["num_videos"].sum())
    by_value = int(counts.group_by("value").agg(pl.col("num_videos").max())["num_videos"].sum()) / total
    per_label = dict(counts.group_by("label").agg(pl.col("num_videos").sum()).iter_rows())
    by_guess = max(per_label.values()) / total
    return theme.bar_chart(
        f"Knowing the {by} raises a guess of the label from {by_guess:.0%} to {by_value:.0%} of these videos",
        theme.by_label(per_label.get("real", 0), per_label.get("fake", 0)),
        merged,
        theme.LABEL_COLORS,
        names=names,
        titles=(by.capitalize(), "Videos"),
    )


def fold_balance_figure(balance: pl.DataFrame) -> go.Figure:
    """Return the videos of each outer fold by label; ``balance`` is of ``queries.fold_balance``."""
    if balance.is_empty():
        return theme.nothing_to_show("Folds", "No folds are recorded yet.")
    folds = balance.group_by("fold", maintain_order=True).agg(
        fakes=pl.col("num_videos").filter(label="fake").sum(), all=pl.col("num_videos").sum()
    )
    shares = (folds["fakes"] / folds["all"]).to_list()
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    fakes = int(folds["fakes"].sum())
    counts = balance.select(pl.format("fold {}", "fold"), "label", "num_videos")
    drawn = theme.bar_chart(
        f"Each fold holds {low if low == high else f'{low} to {high}'} fakes",
        f"{theme.by_label(int(folds['all'].sum()) - fakes, fakes)}; {count_text(folds.height, 'fold')}",
        counts,
        theme.LABEL_COLORS,
        names=[f"fold {fold}" for fold in folds["fold"].sort()],
        titles=("Outer fold", "Videos"),
        upright=True,
    )
    return drawn.update_layout(barmode="group")


def label_kinds_figure(annotations: pl.DataFrame) -> go.Figure:
    """Return rows of the label tables by platform and label, with the labels that no network is trained on."""
    if annotations.is_empty():
        return theme.nothing_to_show("Labels by platform", "The label tables hold no row.")
    label = annotations["label"].fill_null("no label")
    platform = annotations["platform"].fill_null("not stated")
    labels = dict.fromkeys(theme.commonest(label.filter(~label.is_in(list(theme.LABEL_COLORS))), _MOST_LABELS))
    colors = theme.LABEL_COLORS | dict(zip(labels, _OTHER_COLORS, strict=False))
    platforms = theme.commonest(platform, _MOST_PLATFORMS)
    shown = pl.DataFrame({"platform": platform, "label": label})
    for name, chosen in (("platform", platforms), ("label", list(colors))):
        shown = shown.with_columns(
            pl.when(pl.col(name).is_in(chosen)).then(name).otherwise(pl.lit("all others")).alias(name)
        )
    counts = shown.group_by("platform", "label").len()
    names = platforms + ["all others"] * ("all others" in counts["platform"])
    fake, real = int((label == "fake").sum()), int((label == "real").sum())
    neither = annotations.height - fake - real
    rest = f"; {neither:,} neither, which are kept out of training" if neither else ""
    present = int(annotations.filter("is_present")["source_id"].n_unique())
    return theme.bar_chart(
        f"{count_text(fake, 'row')} labelled fake and {real:,} labelled real{rest}",
        f"n = {count_text(annotations.height, 'row')} of {count_text(annotations['source_id'].n_unique(), 'source')}; "
        f"{present:,} of the sources {'has a file' if present == 1 else 'have a file'} here",
        counts,
        {**colors, "all others": theme.CONTROL},
        names=names,
        titles=("Platform", "Rows of the label tables"),
    )


def group_sizes_figure(members: pl.DataFrame, *, members_are: str = "video") -> go.Figure:
    """Return the number of groups by size, in doubling steps, and by the labels of their members.

    Args:
        members: a row each, with ``group_id label``.
        members_are: their name in the singular.
    """
    if members.is_empty():
        return theme.nothing_to_show("Sizes of the groups", f"There is no {members_are} yet.")
    real, fake = ((pl.col("label") == label).any() for label in ("real", "fake"))
    groups = members.group_by("group_id").agg(pl.len().alias("size"), real.alias("real"), fake.alias("fake"))
    kind = (
        pl.when(pl.col("real") & pl.col("fake")).then(pl.lit("real and fake"))
        .when("real").then(pl.lit("real only"))
        .when("fake").then(pl.lit("fake only"))
        .otherwise(pl.lit("neither"))
    )  # fmt: skip
    steps = [int(size).bit_length() - 1 for size in groups["size"]]
    names = ["1", *(f"{1 << step} to {(2 << step) - 1}" for step in range(1, max(steps) + 1))]
    counts = groups.select(pl.Series("size", [names[step] for step in steps]), kind.alias("kind"))
    sizes = groups["size"].sort(descending=True)
    half = int((sizes.cum_sum() < sizes.sum() / 2).sum()) + 1
    finding = f"Half of all {members_are}s are in the {half:,} largest of {groups.height:,} groups"
    if half == 1:
        finding = f"The largest group alone holds {sizes[0] / sizes.sum():.0%} of all {members_are}s"
    return theme.bar_chart(
        finding,
        f"n = {count_text(groups.height, 'group')} of {count_text(members.height, members_are)}; "
        "a group stays whole in every split",
        counts.group_by("size", "kind").len(),
        _GROUP_COLORS,
        names=names,
        titles=(f"{members_are.capitalize()}s in the group", "Groups"),
        upright=True,
    )
