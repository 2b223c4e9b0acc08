import numpy as np
import polars as pl
import pytest

from fvc_lib.analysis.figures.corpus import family_figure, feature_ties

NUMBER = 60


@pytest.fixture(scope="module")
def tables():
    """Features of which one follows the size, one the codec, one the label, one nothing; and their index."""
    draw = np.random.default_rng(4)
    sizes, codecs = draw.integers(100, 2000, NUMBER), draw.integers(0, 3, NUMBER)
    labels = draw.integers(0, 2, NUMBER)
    ids = [f"video{number}" for number in range(NUMBER)]
    columns = {
        "a_size_mean": np.log(sizes) * -3.0,
        "a_codec_mean": codecs * 10 + draw.random(NUMBER),
        "a_label_mean": labels + 0.2 * draw.random(NUMBER),
        "a_noise_mean": draw.random(NUMBER),
        "a_same_mean": np.ones(NUMBER),
    }
    features = pl.DataFrame(
        {"video_id": ids, "group_id": [f"g{number // 2}" for number in range(NUMBER)]}
        | {"label": np.where(labels == 1, "fake", "real")}
        | columns,
        schema_overrides=dict.fromkeys(columns, pl.Float32),
    ).with_columns(
        pl.when(pl.int_range(pl.len()) >= 3).then("a_noise_mean").alias("a_noise_mean"),
        pl.lit(None, pl.Float32).alias("a_none_mean"),
    )
    index = pl.DataFrame(
        {"video_id": ids, "width": sizes, "height": sizes, "num_frames": draw.integers(10, 500, NUMBER)}
        | {"bits_per_second": [None] * 5 + draw.random(NUMBER - 5).tolist(), "codec": [f"c{code}" for code in codecs]}
    )
    return features, index.sample(fraction=1, shuffle=True, seed=1)


def test_ties_tell_which_feature_follows_what(tables):
    found = feature_ties(*tables)
    rows = {row["feature"]: row for row in found.iter_rows(named=True)}
    assert rows["a_size_mean"]["size"] == pytest.approx(1)
    assert rows["a_codec_mean"]["codec"] == pytest.approx(0.94, abs=0.03)
    assert rows["a_label_mean"]["auc"] == 1
    assert found["feature"][:2].to_list() == ["a_size_mean", "a_codec_mean"]
    assert rows["a_noise_mean"]["strongest"] < 0.5
    assert rows["a_noise_mean"]["missing"] == pytest.approx(3 / NUMBER)
    assert (rows["a_same_mean"]["strongest"], rows["a_same_mean"]["auc"]) == (None, 0.5)
    assert (rows["a_none_mean"]["strongest"], rows["a_none_mean"]["auc"], rows["a_none_mean"]["missing"]) == (
        None,
        None,
        1,
    )


def test_the_figure_names_what_differs_most_and_leaves_out_what_nobody_has(tables):
    features, _ = tables
    columns = {name: (name, "unit") for name in ("a_label_mean", "a_noise_mean", "a_none_mean")}
    figure = family_figure(features, "a", columns)
    assert "a: real and fake videos differ most in a_label_mean, AUC 1.000 [" in figure.layout.title.text.replace(
        "<br>", " "
    )
    assert len(figure.data) == 4
    assert figure.data[0].median[0] == pytest.approx(
        features.filter(pl.col("label") == "real")["a_label_mean"].median(), rel=1e-6
    )
    assert "nothing to show" in family_figure(features, "a", {"a_none_mean": ("none", "unit")}).layout.title.text
    assert "nothing to show" in family_figure(features.head(0), "a", columns).layout.title.text
