"""``official`` and ``official_strict``: the corpus's own parts, with the groups that lie in several of them named.

``official`` takes the parts as they are, because that is what published numbers were made with. A group that lies in
several parts (one person, one source video, near-duplicates) is a leak of the split: it is counted, each of its rows
carries the reason, and the gate lets these groups through and no other. ``official_strict`` leaves out what leaks from
the side that learns: validation videos of tested groups, training videos of tested or validation groups.
"""

import polars as pl

from fvc_lib.services.errors import DataError
from fvc_lib.services.tables import LEFT_OUT

NO_PART = "the corpus's own split does not name it"


def official(index: pl.DataFrame, *, strict: bool) -> pl.DataFrame:
    """Return ``video_id group_id label fold target part reason`` of the one training, fold 0.

    Raises:
        DataError: the corpus has no split of its own, or none with a training and a test part.
    """
    parts = set(index["official_split"].drop_nulls())
    if missing := [part for part in ("train", "test") if part not in parts]:
        has = f"has {', '.join(sorted(parts))} alone" if parts else "has none"
        raise DataError(
            f"protocol {'official_strict' if strict else 'official'}: wanted a corpus with a split of its own, and "
            f"this one {has}; there is no part {' and no '.join(missing)}. Give a manifest with a column split, the "
            "corpus's lists where they were published, or -p protocol kfold."
        )
    rows = index.select(
        "video_id",
        "group_id",
        "label",
        fold=pl.lit(0, pl.Int64),
        part=pl.col("official_split").fill_null(LEFT_OUT),
        reason=pl.when(pl.col("official_split").is_null()).then(pl.lit(NO_PART)),
    )
    part, used = pl.col("part"), pl.col("part") != LEFT_OUT
    of_group = part.filter(used).unique().sort().over("group_id", mapping_strategy="join")
    rows = rows.sort("video_id").with_columns(of_group=of_group)
    leaks = used & (pl.col("of_group").list.len() > 1)
    named = pl.format("its group is in several official parts: {}", pl.col("of_group").list.join(", "))
    if strict:
        tested, chooses = (pl.col("of_group").list.contains(each) for each in ("test", "validation"))
        leaks = ((part == "train") & (tested | chooses)) | ((part == "validation") & tested)
    rows = rows.with_columns(reason=pl.when(leaks).then(named).otherwise("reason"))
    if strict:
        rows = rows.with_columns(part=pl.when(leaks).then(pl.lit(LEFT_OUT)).otherwise("part"))
    target = pl.when(pl.col("part") == "test").then(pl.lit("official test"))
    return rows.with_columns(target=target).drop("of_group")
