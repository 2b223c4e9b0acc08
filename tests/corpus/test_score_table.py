"""Tables of anyone's scores: what is read from them, and what is refused with its row and a remedy."""

import gzip
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from fvc_lib.corpus.index import used_for
from fvc_lib.corpus.score_table import ONE_DETECTOR, read_score_table, with_corpus
from fvc_lib.services.errors import DataError, UsageError
from tests.corpus.published import text


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    """Write a table, and return its path."""
    return lambda content, name="scores.csv": text(tmp_path, name, content.splitlines())


def test_a_column_per_detector_a_row_per_detector_and_parquet_are_the_same(table, tmp_path):
    wide = read_score_table(table("video,label,group,score_A,B_score\nx,real,g,0.25,1\ny,fake,,0.5,\nz,fake,,1,2\n"))
    rows = ["x,real,g,A,0.25", "y,fake,,A,0.5", "z,fake,,A,1", "x,real,g,B,1", "z,fake,,B,2"]
    long = read_score_table(table("\n".join(["video,label,group,detector,score", *rows]), "long.csv"))
    assert wide.scores.to_dict(as_series=False) == {"A": [0.25, 0.5, 1.0], "B": [1.0, None, 2.0]}
    assert long.scores.equals(wide.scores)
    assert long.videos.equals(wide.videos)
    assert wide.videos["group_id"].to_list() == ["g", None, None]
    assert wide.has_groups
    columns = {"path": ["x", "y", "z"], "label": ["real", "fake", "fake"], "group": ["g", None, None]}
    pl.DataFrame({**columns, "A": [0.25, 0.5, 1], "B": [1, None, 2]}).rename(
        {"A": "prob_A", "B": "prob_B"}
    ).write_parquet(tmp_path / "t.parquet")
    assert read_score_table(tmp_path / "t.parquet").scores.equals(wide.scores)


def test_labels_mean_what_the_map_says_and_others_are_counted(table):
    path = table("video,label,score\nx,1,0.1\ny,0,0.2\nz,unsure,0.3\n")
    found = read_score_table(path, label_map={"1": "fake", "0": "real"})
    assert found.videos["label"].to_list() == ["fake", "real"]
    assert "1 rows are labelled neither real nor fake" in found.notes[0]


def test_columns_that_are_no_scores_are_left_alone_and_prefixed_ones_are_the_detectors(table):
    found = read_score_table(table("video,label,note,num_frames,A\nx,real,hi,7,0.1\ny,fake,ho,8,1\n"))
    assert found.scores.columns == ["A"]
    named = table("word,video,label,score_A,rank,problem,\na,x,real,1,4,none,0\nb,y,fake,2,5,none,1\n")
    assert read_score_table(named).scores.columns == ["A"]
    assert read_score_table(named, detectors=["rank"]).scores["rank"].to_list() == [4, 5]
    rows = ["x,real,0.1,4,0.5,2020,1,0", "y,fake,0.2,3,0,2021,1,1", "z,fake,0.3,5,1,2022,1,1"]
    several = table("\n".join(["video,label,A,seconds,B,year,same,truth", *rows]))
    found = read_score_table(several)
    assert found.scores.columns == ["A", "B"]
    assert found.notes[0].startswith("Read as scores: 'A', 'B'; not read: 'seconds', 'same', 'truth'")
    assert read_score_table(several, detectors=["year"]).scores["year"].to_list() == [2020, 2021, 2022]
    capital = table("video,label,Score,other,score_real\nx,real,1,4,0.9\ny,fake,2,5,0.1\n")
    assert read_score_table(capital).scores.to_dict(as_series=False) == {ONE_DETECTOR: [1, 2]}
    alike = table("video,label,prob_A,A_score,lat_A\nx,real,1,4,0.9\ny,fake,2,5,0.1\n")
    assert read_score_table(alike).scores.columns == ["prob_A", "A_score"]


def test_a_matrix_of_several_modalities_is_read_by_its_rows_of_one_with_sources_of_reals(table, tmp_path):
    header = "clip,kind,is_fake,generator,prob_a,lat_a,prob_b,lat_b,prob_of_sounds,fused_score"
    rows = [
        "v0,video,0,phone,0.1,0.2,0.5,0.3,,0.2",
        "v1,video,1,gan,0.9,0.3,,0.1,,0.7",
        "s0,sound,1,tts,0.2,1,,1,0.3,1",
    ]
    path = tmp_path / "matrix.csv.gz"
    path.write_bytes(gzip.compress("\n".join([header, *rows]).encode()))
    asked = {"columns": {"video": "clip", "label": "is_fake"}, "where": {"kind": "video"}}
    found = read_score_table(path, **asked)
    assert found.scores.to_dict(as_series=False) == {"a": [0.1, 0.9], "b": [0.5, None], "fused": [0.2, 0.7]}
    facts = found.videos.select("label", "generator", "real_source").rows()
    assert facts == [("real", None, "phone"), ("fake", "gan", None)]
    assert found.notes[0] == "2 of 3 rows are read: kind=video."
    assert all(name in found.notes[1].partition("not read")[2] for name in ("lat_a", "lat_b", "prob_of_sounds"))
    for where, message in (({"kid": "video"}, "no column 'kid'.*Did you mean 'kind'"), ({"kind": "x"}, "2 x 'video'")):
        with pytest.raises(UsageError, match=message):
            read_score_table(path, **{**asked, "where": where})


def test_scores_that_are_higher_for_reals_are_turned_round(table):
    path = table("video,label,prob_A,prob_B\nx,real,0.75,5\ny,fake,0.25,2\n")
    found = read_score_table(path, higher_is_real=True)
    assert found.scores.to_dict(as_series=False) == {"A": [0.25, 0.75], "B": [-5.0, -2.0]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("video,label,score\nx,real,0.1\ny,fake,inf\n", "row 2, video 'y': the score of 'score' is 'inf'"),
        ("video;label;score\nx;real;0.1\ny;fake;0,5\n", "row 2, .*'0,5'.*such as 0.5.*--detectors"),
        ("video,label,score\n./a,real,1\na,real,2\nb,fake,3\n", "row 1, video 'a': has two scores"),
        ("video,label,detector,score\nx,real,A,1\nx,fake,B,1\n", "row 1, video 'x': has more than one 'label'"),
        ("video,label,score\nx,1,0.1\ny,0,0.2\n", "got 1 x '0', 1 x '1'.*--label-map 1=fake,0=real"),
        ("video,label,score\nx,real,0.1\ny,real,0.2\n", "both real and fake"),
        ("video,label,score\nx,real,0.1,7\n", "row 1: its number of cells"),
        ("video,label,score\n,real,0.1\ny,fake,1\n", "row 1, .*cell of the video is empty"),
        ("video,label,detector,score\nx,real,,1\ny,fake,A,1\n", "row 1, .*cell of 'detector' is empty"),
        ("video,label,score\n", "a header and no row"),
    ],
)
def test_what_gives_no_honest_number_is_refused_with_its_row(table, content, words):
    with pytest.raises(DataError, match=words):
        read_score_table(table(content))


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("vidoe,label,score\nx,real,1\n", {}, r"wanted a column 'video'.*Did you mean 'vidoe'"),
        ("video,label,note\nx,real,a\ny,fake,b\n", {}, "no column has scores.*--detectors"),
        ("video,label,score_real,guess\nx,real,0.9,0\ny,fake,0.1,1\n", {}, "no column has scores"),
        ("video,label,detector,score\nx,real,A,1\ny,fake,B,1\n", {"detectors": ["C"]}, r"no detector 'C'.*'A', 'B'"),
    ],
)
def test_a_table_without_what_is_needed_or_with_unknown_names_is_refused(table, content, options, message):
    with pytest.raises(UsageError, match=message):
        read_score_table(table(content), **options)


@pytest.fixture
def index() -> pl.DataFrame:
    return pl.DataFrame(
        {
            "path": ["real/a.mp4", "fake/b.mp4", "fake/c.mp4", "real/c.mp4"], "video_id": ["1111", "2222", "3333", "4"],
            "source_id": ["s1", "s2", "s3", "s4"], "label": ["real", "fake", "fake", "real"],
            "group_id": ["g1", "g2", "g3", "g3"], "generator": [None, "Sora", None, None],
            "real_source": ["web", None, None, None], "content_sha256": ["1", "2", "3", "4"],
        }
    )  # fmt: skip


def test_a_corpus_gives_groups_to_videos_known_by_path_id_or_name(table, index):
    content = (
        "video,label,group,score\n/data/real/a.mp4,real,,1\n2222,fake,own,2\nfake/c,fake,,3\nc,real,,4\nz,real,,5\n"
    )
    found, of_corpus = with_corpus(read_score_table(table(content)), index)
    rows = {row["video_id"]: row for row in found.videos.iter_rows(named=True)}
    assert rows["/data/real/a.mp4"]["group_id"] == "corpus: g1"
    assert rows["2222"]["generator"] == "Sora"
    assert rows["fake/c"]["group_id"] == "corpus: g3"
    assert rows["c"]["group_id"] is None, "two files are called so"
    assert sorted(of_corpus["video_id"]) == ["/data/real/a.mp4", "2222", "fake/c"]
    assert "3 of 5 videos were found" in found.notes[-1]
    with pytest.raises(DataError, match="none of the table's 2 videos"):
        with_corpus(read_score_table(table("video,label,score\nu,real,1\nv,fake,1\n")), index)


def test_a_name_alike_is_no_match_where_folders_or_labels_differ(table, index):
    content = (
        "video,label,score\nfake/a.mp4,real,1\nb,real,2\nother/deep/b.mp4,fake,3\nx/fake/b.mp4,fake,4\nb.avi,fake,5\n"
    )
    _, of_corpus = with_corpus(read_score_table(table(content)), index)
    assert sorted(of_corpus["video_id"]) == ["b.avi", "x/fake/b.mp4"]


def test_a_duplicate_that_the_index_leaves_out_is_the_video_that_it_has(table, index):
    content = "video,label,score\nreal/copy.mp4,real,1\nreal/a.mp4,real,2\nfake/b.mp4,fake,3\n"
    detail = "same content as 'real/a.mp4', which is used."
    rejected = pl.DataFrame({"path": ["real/copy.mp4"], "reason": ["duplicate_content"], "detail": [detail]})
    found, of_corpus = with_corpus(read_score_table(table(content)), index, used_for(rejected))
    assert of_corpus.height == 3
    groups = dict(found.videos.select("video_id", "group_id").iter_rows())
    assert groups["real/copy.mp4"] == groups["real/a.mp4"] != groups["fake/b.mp4"]


def test_copies_in_the_corpus_join_groups_of_the_table_and_names_alike_do_not(table, index):
    one = index.with_columns(group_id=pl.Series(["g1", "g1", "g3", "A"]))
    rows = ["real/a.mp4,real,A,1", "fake/b.mp4,fake,B,2", "fake/c.mp4,fake,,3", "real/c.mp4,real,,4", "z,real,B,5"]
    found, _ = with_corpus(read_score_table(table("\n".join(["video,label,group,score", *rows]))), one)
    groups = dict(found.videos.select("video_id", "group_id").iter_rows())
    assert groups["real/a.mp4"] == groups["fake/b.mp4"] == groups["z"]
    assert len({groups[name] for name in ("real/a.mp4", "fake/c.mp4", "real/c.mp4")}) == 3


FACES = "faces/{0}/{1:04}.png"
FRAMES = {
    "frames of a folder": ([FACES, "real"], [FACES, "fake"], {"faces/0": "real", "faces/1": "fake"}),
    "back slashes and endings": (
        ["a\\{0}\\{1}.JPG", "real"], ["./a/{0}/{1}.jpg", "fake"], {"a/0": "real", "a/1": "fake"}
    ),
    "parts of frames": (["v{0}_shot{1}/{1}.png", "real"], ["v{0}_clip{1}/9.png", "fake"], {"v0": "real", "v1": "fake"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FRAMES)
def test_rows_of_frames_or_parts_are_one_video_with_their_mean_score(table, name):
    *kinds, videos = FRAMES[name]
    rows = [(pattern.format(kind, place), label, kind + place / 4) for kind, (pattern, label) in enumerate(kinds)
            for place in range(3)]  # fmt: skip
    content = "".join(f"{video},{label},{score}\n" for video, label, score in [("video", "label", "score"), *rows])
    read = read_score_table(table(content))
    assert dict(read.videos.select("video_id", "label").iter_rows()) == videos
    assert dict(zip(read.videos["video_id"], read.scores["score"], strict=True)) == {
        video: {"real": 0.25, "fake": 1.25}[label] for video, label in videos.items()
    }
    (note,) = read.notes
    assert note.startswith("6 ids are frames or parts of 2 videos")
    assert "mean" in note


@pytest.mark.parametrize(
    "ids",
    [
        ["real/0.png", "real/1.png", "fake/0.png", "fake/1.png"],
        ["x/0.png", "x/1.png", "x/2.png", "x/3.png"],
        ["v_seg1.mp4", "w.mp4", "v_seg2.mp4", "u.mp4"],
    ],
)
def test_rows_of_frames_or_parts_of_no_one_video_are_refused_or_stay_in_their_groups(table, ids):
    labels = ["real", "real", "fake", "fake"]
    rows = list(zip(ids, labels, strict=True))
    with pytest.raises(DataError, match=r"row \d, .*column 'group'"):
        read_score_table(table("path,label,score\n" + "".join(f"{each},{label},0.5\n" for each, label in rows)))
    content = "".join(f"{each},{label},0.5,g{number}\n" for number, (each, label) in enumerate(rows))
    read = read_score_table(table("path,label,score,group\n" + content))
    assert set(ids[:2]) <= {*read.videos["video_id"], "b"}
    assert read.videos["group_id"].null_count() == 0
