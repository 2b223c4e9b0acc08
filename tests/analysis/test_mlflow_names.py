import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fvc_lib.analysis.mlflow.content import MAX_KEY, fitted, key_of, parts_of

HOSTILE = [
    "<script>alert(1)</script>",
    "a/b",
    "..",
    ".",
    "",
    "' OR 1=1 --",
    'x"y',
    "line\nbreak",
    "_x2F_",
    "a_x/",
    "Ünï 你好",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_becomes_a_key_and_comes_back(name):
    key = key_of("train", name)
    assert re.fullmatch(r"[\w.\- /]+", key)
    assert parts_of(key) == ("train", name)


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_every_list_of_texts_comes_back_from_its_key(parts):
    key = key_of(*parts)
    assert parts_of(key) == tuple(parts)
    assert all(part not in ("", ".", "..") for part in key.split("/"))


@given(st.text(alphabet="_xAF05/.", max_size=12))
def test_texts_that_look_like_escapes_come_back_too(text):
    assert parts_of(key_of(text)) == (text,)


def test_usual_names_stay_as_they_are():
    assert key_of("validation", "roc_auc") == "validation/roc_auc"
    assert key_of("train", "max_xyz 0.5-a") == "train/max_xyz 0.5-a"


def test_names_that_are_too_long_stay_apart():
    first, second = fitted("a" * 300), fitted("a" * 299 + "b")
    assert len(first) <= MAX_KEY
    assert first != second
    assert fitted("a" * MAX_KEY) == "a" * MAX_KEY
