"""Patterns of braces and wildcards that name tars."""

import re

import pytest

from fvc_lib.services.config import RunConfig
from fvc_lib.services.errors import UsageError
from fvc_lib.services.run_paths import fixed_folder, is_pattern, tars_of


@pytest.fixture
def folder(tmp_path):
    for name in ("a/t-08", "a/t-09", "a/t-10", "b/t-08", "b/.hidden"):
        (tmp_path / f"{name}.tar").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.tar").touch()
    (tmp_path / "a" / "note.txt").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("a/t-{08..10}.tar", ["a/t-08.tar", "a/t-09.tar", "a/t-10.tar"]),
        ("{a,b}/t-08.tar", ["a/t-08.tar", "b/t-08.tar"]),
        ("{a,b}/t-{08..08}.tar", ["a/t-08.tar", "b/t-08.tar"]),
        ("a/t-{0,1}[089].tar", ["a/t-08.tar", "a/t-09.tar", "a/t-10.tar"]),
        ("b/*.tar", ["b/t-08.tar"]),
        ("**/t-08.tar", ["a/t-08.tar", "b/t-08.tar"]),
    ],
)
def test_braces_and_wildcards_name_tars_in_order(folder, pattern, named):
    assert is_pattern(folder / pattern)
    assert [str(tar.relative_to(folder)) for tar in tars_of(folder / pattern)] == named


@pytest.mark.parametrize(
    ("pattern", "fact"),
    [
        ("a/t-{08..12}.tar", r"t-11\.tar"),
        ("a/t-{8,08}*.tar", r"t-8\*\.tar"),
        ("c/*.tar", r"c/\*\.tar"),
        ("a/*", r"note\.txt"),
        *((pattern, re.escape(pattern)) for pattern in (
            "{a,b}*", "a/t-{08..10.tar", "a/t-{10..08}.tar", "a/t-{0,{1,2}}.tar", "a/t-{}.tar",
            "a/t-{1..99999999999}.tar", "a/{0..9999}{0..9999}.tar",
        )),
    ],
)  # fmt: skip
def test_a_pattern_that_cannot_be_followed_names_the_fault(folder, pattern, fact):
    with pytest.raises(UsageError, match=fact):
        tars_of(folder / pattern)


def test_a_path_that_exists_is_no_pattern(tmp_path):
    (tmp_path / "a[1]{2}.tar").touch()
    assert not is_pattern(tmp_path / "a[1]{2}.tar")
    assert not is_pattern("plain")


def test_tars_are_named_relative_to_what_has_no_wildcard(tmp_path):
    assert fixed_folder(tmp_path / "a" / "{0..9}" / "x.tar") == tmp_path / "a"
    assert fixed_folder(tmp_path / "a" / "*.tar") == tmp_path / "a"


def test_a_comma_between_braces_does_not_part_corpora():
    config = RunConfig(more_corpora="{real,fake}/*.tar,b,c")
    assert config.more_corpora == ("{real,fake}/*.tar", "b", "c")
