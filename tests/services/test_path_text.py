import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from fvc_lib.services.atomic_files import path_from_text, path_to_text
from fvc_lib.services.errors import DataError

NAMES = st.binary(min_size=1, max_size=40).filter(lambda raw: b"\0" not in raw and b"/" not in raw)


@given(st.lists(NAMES, min_size=1, max_size=3))
def test_every_name_of_bytes_survives(parts: list[bytes]) -> None:
    path = Path(*(os.fsdecode(part) for part in parts))
    text = path_to_text(path)
    assert os.fsencode(path_from_text(text)) == os.fsencode(path)
    assert text.encode("utf-8").decode("utf-8") == text


@pytest.mark.parametrize(
    "name", ["plain.mp4", "a 'b' \"c\".mp4", "two\nlines.mp4", "[x]*?.mp4", "🎥 видео.mp4", "100%.mp4"]
)
def test_readable_names_stay_as_they_are(name: str) -> None:
    assert path_to_text(name) == name


def test_bytes_and_backslashes_are_spelled_out() -> None:
    assert path_to_text(os.fsdecode(b"caf\xe9.mp4")) == r"caf\xe9.mp4"
    assert path_to_text(r"caf\xe9.mp4") == r"caf\\xe9.mp4"


@pytest.mark.parametrize("text", ["a\\b", "a\\", "\\x4", "\\xZZ", "\\\\\\"])
def test_text_that_was_never_written_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="lone backslash"):
        path_from_text(text)
