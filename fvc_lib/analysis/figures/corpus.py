"""Figures of what a corpus says of itself: labels by platform, how large its groups are, and what joined them.

``counts``, ``balance`` are answers of ``read.queries``; ``annotations``, ``links`` rows of the tables of that name.
"""

import plotly.graph_objects as go
import polars as pl

from fvc_lib.analysis.figures import theme
from fvc_lib.analysis.wording import count_text, figure_text, number_text

# --- Figures of the data: what the index holds and how the folds came out

_MOST_BARS = 14
# Above the plot on the left; on the right it would lie under the figure's own buttons.
LEGEND = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "traceorder": "normal"}


def index_overview_figure(counts: pl.DataFrame, by: str) -> go.Figure:
    """Videos of ``queries.index_counts`` by label and one property, ``by``, rarer values gathered in "other"."""
    if counts.is_empty():
        return theme.nothing_to_show(f"Videos by {by}", "The index has no videos yet.")
    totals = (
        counts.group_by("value").agg(pl.col("num_videos").sum()).sort("num_videos", "value", descending=[True, False])
    )
    chosen = totals["value"].head(_MOST_BARS).to_list()
    merged = _gathered(counts, chosen)
    order = chosen + ([_OTHER] if totals.height > _MOST_BARS else [])
    figure = theme.figure(_index_finding(counts, by), _videos_by_label(counts), height=150 + 34 * len(order))
    for label, color in theme.LABEL_COLORS.items():
        rows = merged.filter(pl.col("label") == label)
        figure.add_trace(
            _bars([figure_text(v) for v in rows["value"]], rows["num_videos"].to_list(), label, color, horizontal=True)
        )
    names = [figure_text(value) for value in reversed(order)]
    figure.update_yaxes(title_text=figure_text(by.capitalize()), showgrid=False, type="category")
    figure.update_yaxes(categoryorder="array", categoryarray=names)
    figure.update_xaxes(title_text="Videos")
    figure.update_layout(barmode="stack", legend=LEGEND)
    return figure


def fold_balance_figure(balance: pl.DataFrame) -> go.Figure:
    """Videos of each outer fold by label."""
    if balance.is_empty():
        return theme.nothing_to_show("Folds", "No folds are recorded yet.")
    folds = balance.pivot("label", index="fold", values="num_videos").fill_null(0).sort("fold")
    shares = [
        row.get("fake", 0) / max(row.get("fake", 0) + row.get("real", 0), 1) for row in folds.iter_rows(named=True)
    ]
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    figure = theme.figure(
        f"Each fold holds {low if low == high else f'{low} to {high}'} fakes",
        f"{_videos_by_label(balance)}; {count_text(folds.height, 'fold')}; numbers on the bars: groups",
        height=340,
    )
    for label, color in theme.LABEL_COLORS.items():
        rows = balance.filter(pl.col("label") == label)
        names = [f"fold {fold}" for fold in rows["fold"]]
        bars = _bars(names, rows["num_videos"].to_list(), label, color, horizontal=False)
        figure.add_trace(bars.update(text=rows["num_groups"].to_list(), textposition="inside", textangle=0))
    figure.update_yaxes(title_text="Videos")
    figure.update_xaxes(showgrid=False, title_text="Outer fold", type="category")
    figure.update_layout(barmode="group", bargap=0.35, legend=LEGEND)
    return figure


_OTHER = "other"


def _gathered(counts: pl.DataFrame, chosen: list[str]) -> pl.DataFrame:
    value = pl.when(pl.col("value").is_in(chosen)).then("value").otherwise(pl.lit(_OTHER)).alias("value")
    return counts.with_columns(value).group_by("label", "value", maintain_order=True).agg(pl.col("num_videos").sum())


def _index_finding(counts: pl.DataFrame, by: str) -> str:
    """How far the property tells the label: the share of these videos right by guessing its more frequent label.

    A description of the sample, not a test: the metadata-only control is the test.
    """
    per_value = counts.group_by("value").agg(pl.col("num_videos").max().alias("majority"))
    total = int(counts["num_videos"].sum())
    by_value = int(per_value["majority"].sum()) / total
    by_guess = max(counts.group_by("label").agg(pl.col("num_videos").sum())["num_videos"].to_list()) / total
    return f"Knowing the {by} raises a guess of the label from {by_guess:.0%} to {by_value:.0%} of these videos"


def _videos_by_label(counts: pl.DataFrame) -> str:
    totals = dict(counts.group_by("label").agg(pl.col("num_videos").sum()).iter_rows())
    real, fake = totals.get("real", 0), totals.get("fake", 0)
    return f"n = {count_text(real + fake, 'video')} ({real:,} real, {fake:,} fake)"


def _bars(names: list[str], values: list[int], label: str, color: str, *, horizontal: bool) -> go.Bar:
    x, y = (values, names) if horizontal else (names, values)
    shown = "%{y}: %{x}" if horizontal else "%{x}: %{y}"
    return go.Bar(
        x=x, y=y, orientation="h" if horizontal else "v", name=label, marker={"color": color},
        insidetextfont={"color": "white", "size": 11}, hovertemplate=shown + f" videos<extra>{label}</extra>",
    )  # fmt: skip


_OTHER_COLORS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9")  # of labels that nothing is trained on
_MOST_LABELS, _MOST_PLATFORMS = 6, 12
_NO_LABEL, _NO_PLATFORM, _REST = "no label", "not stated", "all others"
_GROUP_COLORS = {
    "real only": theme.REAL, "fake only": theme.FAKE, "real and fake": theme.MODEL, "neither": theme.CONTROL,
}  # fmt: skip
_WHY = {
    "same_source": "one source id in several groups",
    "same_content": "files with one content",
    "near_duplicate": "pictures that are near each other",
}


def label_kinds_figure(annotations: pl.DataFrame) -> go.Figure:
    """Rows of the label tables by platform and label, also the labels that nothing is trained on."""
    if annotations.is_empty():
        return theme.nothing_to_show("Labels by platform", "The label tables hold no row.")
    rows = annotations.select(
        _commonest(annotations["label"].fill_null(_NO_LABEL), _MOST_LABELS, tuple(theme.LABEL_COLORS)),
        _commonest(annotations["platform"].fill_null(_NO_PLATFORM), _MOST_PLATFORMS),
        "source_id",
        "is_present",
    )
    platforms = _by_frequency(rows["platform"])
    figure = theme.figure(_labels_finding(rows), _labels_subtitle(rows), height=190 + 38 * len(platforms))
    others = [label for label in _by_frequency(rows["label"]) if label not in theme.LABEL_COLORS]
    colors = theme.LABEL_COLORS | {
        label: _OTHER_COLORS[number % len(_OTHER_COLORS)] for number, label in enumerate(others)
    }
    for label, color in colors.items():
        counts = dict(rows.filter(pl.col("label") == label).group_by("platform").len().iter_rows())
        if counts:
            values = [int(counts.get(platform, 0)) for platform in platforms]
            figure.add_trace(_bar(values, [figure_text(name) for name in platforms], figure_text(label), color))
    figure.update_xaxes(title_text="Rows of the label tables")
    figure.update_yaxes(title_text="Platform", showgrid=False, type="category", autorange="reversed")
    figure.update_layout(barmode="stack", legend=LEGEND)
    return figure


def group_sizes_figure(members: pl.DataFrame, *, members_are: str = "video") -> go.Figure:
    """How many groups there are of each size, in doubling steps, by the labels of their ``members`` (a row each)."""
    if members.is_empty():
        return theme.nothing_to_show("Sizes of the groups", f"There is no {members_are} yet.")
    groups = members.group_by("group_id").agg(
        pl.len().cast(pl.Int64).alias("size"),
        *((pl.col("label") == label).any().alias(label) for label in ("real", "fake")),
    )
    steps = [1 << power for power in range(int(groups["size"].max()).bit_length())]  # type: ignore[arg-type]
    names = [str(low) if low == 1 else f"{low} to {2 * low - 1}" for low in steps]
    figure = theme.figure(
        _sizes_finding(groups["size"], members_are),
        f"n = {count_text(groups.height, 'group')} of {count_text(members.height, members_are)}; "
        "a group stays whole in every split",
        height=360,
    )
    for kind, color in _GROUP_COLORS.items():
        sizes = groups.filter(_kind() == kind)["size"].to_list()
        if sizes:
            values = [sum(low <= size < 2 * low for size in sizes) for low in steps]
            figure.add_trace(_bar(names, values, kind, color, upright=True))
    figure.update_xaxes(title_text=f"{members_are.capitalize()}s in the group", showgrid=False, type="category")
    figure.update_yaxes(title_text="Groups")
    figure.update_layout(barmode="stack", bargap=0.25, legend=LEGEND)
    return figure


def group_links_figure(links: pl.DataFrame) -> go.Figure:
    """Links that joined groups which the label source kept apart, by what they stand on."""
    if links.is_empty():
        return theme.nothing_to_show("Joined groups", "Nothing was joined beyond what the corpus states.")
    counts = dict(links.group_by("why").len().iter_rows())
    reasons = [why for why in _WHY if why in counts] + sorted(set(counts) - set(_WHY))
    joined = links["group_id"].n_unique()
    figure = theme.figure(
        f"{count_text(links.height, 'link')} made {count_text(joined, 'group')} of what stood apart",
        f"n = {count_text(links.height, 'link')}; each joins two groups, or videos without one, that the label source "
        "does not join",
        height=190 + 44 * len(reasons),
    )
    names = [figure_text(_WHY.get(why, why)) for why in reasons]
    figure.add_trace(_bar([int(counts[why]) for why in reasons], names, "links", theme.MODEL))
    figure.update_xaxes(title_text="Links", tickformat=",d", rangemode="tozero", dtick=1 if links.height < 10 else None)
    figure.update_yaxes(title_text="What joined them", showgrid=False, type="category", autorange="reversed")
    figure.update_layout(showlegend=False)
    return figure


def group_lookup_figure(scores: pl.DataFrame) -> go.Figure:
    """Return the AUC of an oracle that knows groups alone: ``split value low high num_rows num_groups``."""
    if scores.is_empty():
        return theme.nothing_to_show(
            "Recognising the group", "There are too few groups with real and fake members to deal them into folds."
        )
    said = " and ".join(f"{number_text(row['value'])} {row['split']}" for row in scores.iter_rows(named=True))
    figure = theme.figure(
        f"Recognising the group, and nothing else, scores an AUC of {said} where folds are dealt that way",
        f"n = {count_text(int(scores['num_rows'][0]), 'labelled source')} in "
        f"{count_text(int(scores['num_groups'][0]), 'group')}; lines: interval over groups",
        height=270,
    )
    values = scores["value"].to_list()
    figure.add_vline(x=0.5, line={"color": theme.NEUTRAL, "dash": "dash", "width": 1}, annotation_text="chance")
    figure.add_trace(
        go.Scatter(
            x=values, y=[figure_text(split) for split in scores["split"]], mode="markers+text",
            text=[number_text(value) for value in values], textposition="top center", cliponaxis=False,
            marker={"size": 11, "color": [theme.NOT_ABOVE_CONTROL if v > 0.6 else theme.ABOVE_CONTROL for v in values]},
            error_x={
                "type": "data", "symmetric": False, "color": theme.NEUTRAL,
                "array": (scores["high"] - scores["value"]).to_list(),
                "arrayminus": (scores["value"] - scores["low"]).to_list(),
            },
            hovertemplate="%{y}: AUC %{x:.3f}<extra></extra>", showlegend=False,
        )
    )  # fmt: skip
    figure.update_xaxes(title_text="ROC AUC", range=[0.3, 1.03])
    figure.update_yaxes(title_text="Folds dealt", showgrid=False, type="category", range=[scores.height - 0.6, -0.7])
    return figure


def _labels_finding(rows: pl.DataFrame) -> str:
    fake, real = (int((rows["label"] == label).sum()) for label in ("fake", "real"))
    neither = rows.height - fake - real
    rest = f"; {neither:,} neither, which are kept out of training" if neither else ""
    return f"{count_text(fake, 'row')} labelled fake and {real:,} labelled real{rest}"


def _labels_subtitle(rows: pl.DataFrame) -> str:
    present = int(rows.filter("is_present")["source_id"].n_unique())
    return (
        f"n = {count_text(rows.height, 'row')} of {count_text(rows['source_id'].n_unique(), 'source')}; "
        f"{present:,} of the sources {'has a file' if present == 1 else 'have a file'} here"
    )


def _sizes_finding(sizes: pl.Series, members_are: str) -> str:
    ordered = sizes.sort(descending=True)
    half = int((ordered.cum_sum() < ordered.sum() / 2).sum()) + 1
    if half == 1:
        return f"The largest group alone holds {int(ordered[0]) / int(ordered.sum()):.0%} of all {members_are}s"
    return f"Half of all {members_are}s are in the {half:,} largest of {len(sizes):,} groups"


def _kind() -> pl.Expr:
    return (
        pl.when(pl.col("real") & pl.col("fake"))
        .then(pl.lit("real and fake"))
        .when("real")
        .then(pl.lit("real only"))
        .when("fake")
        .then(pl.lit("fake only"))
        .otherwise(pl.lit("neither"))
    )


def _commonest(values: pl.Series, limit: int, always: tuple[str, ...] = ()) -> pl.Series:
    """Return the column with all values but the ``limit`` commonest and those in ``always`` merged into one."""
    chosen = [*_by_frequency(values)[:limit], *always]
    return values.to_frame().select(pl.when(pl.first().is_in(chosen)).then(pl.first()).otherwise(pl.lit(_REST)))[
        values.name
    ]


def _by_frequency(values: pl.Series) -> list[str]:
    name = values.name
    counts = values.to_frame().group_by(name).len().sort(["len", name], descending=[True, False])
    return [str(value) for value in counts[name]]


def _bar(x: list[int] | list[str], y: list[int] | list[str], name: str, color: str, *, upright: bool = False) -> go.Bar:
    shown = "%{x}: %{y}" if upright else "%{y}: %{x}"
    return go.Bar(
        x=x, y=y, orientation="v" if upright else "h", name=name, marker={"color": color},
        hovertemplate=f"{shown}<extra>{name}</extra>",
    )  # fmt: skip
