"""What a run writes shows no secret of the environment, however it was written or cut."""

import base64
import html
import itertools
import json
from urllib.parse import quote

import pytest
from hypothesis import given, strategies as st

from fvc_lib.services.records.redaction import REPLACEMENT, Redactor, StreamRedactor

SECRET = "s3cr&t/+\"'pass wörd=="
ENVIRON = {"MY_API_TOKEN": SECRET, "HOME": "/home/someone", "DATABASE": "postgres://bob:hunter22@db/x"}


@pytest.mark.parametrize(
    "written",
    [
        SECRET,
        quote(SECRET, safe=""),
        json.dumps(SECRET),
        json.dumps(SECRET, ensure_ascii=False),
        repr(SECRET),
        html.escape(SECRET),
        base64.b64encode(SECRET.encode()).decode(),
        base64.b64encode(b"user:" + SECRET.encode()).decode(),
        base64.urlsafe_b64encode(b"user1:" + SECRET.encode() + b"!").decode(),
        base64.b64encode(b"a user:" + SECRET.encode()).decode(),
    ],
)
def test_a_secret_is_hidden_however_it_is_written(written):
    shown = Redactor(ENVIRON).text(f"before {written} after")
    assert shown.startswith("before ")
    assert shown.endswith(" after")
    assert REPLACEMENT in shown
    for piece in (SECRET, written.strip("\"'=")[4:-4]):
        assert piece not in shown


def test_what_is_no_secret_stands():
    redactor = Redactor(
        {**ENVIRON, "SHORT_TOKEN": "abc", "GIT_AUTHOR_NAME": "Some Author", "TOKEN_FILE": "/run/token.txt"}
    )
    text = "abc of Some Author in /home/someone and /run/token.txt, git@host: ssh://git@host/x https://host/a@b"
    assert redactor.text(text) == text


def test_the_password_of_a_url_is_hidden_whatever_variable_it_stands_in():
    redactor = Redactor(ENVIRON)
    assert redactor.text("hunter22 postgres://bob:hunter22@db/x") == "[secret] postgres://bob:[secret]@db/x"
    assert Redactor({}).text("git clone https://me:tok3n@host/x") == "git clone https://me:[secret]@host/x"
    assert Redactor({}).text("https://ghp_0123456789abcdef@host/x") == "https://[secret]@host/x"


def test_every_text_of_a_document_is_redacted():
    document = {"a": [SECRET, 1, None, {SECRET: {"b": f"x{SECRET}"}}], "n": 1.5}
    redacted = Redactor(ENVIRON).tree(document)
    assert redacted == {"a": [REPLACEMENT, 1, None, {REPLACEMENT: {"b": f"x{REPLACEMENT}"}}], "n": 1.5}


def test_a_secret_that_begins_with_another_goes_as_a_whole():
    assert Redactor({"A_TOKEN": "abcdef", "B_TOKEN": "abcdefgh"}).text("abcdefgh abcdef") == "[secret] [secret]"


@given(st.lists(st.integers(0, 80), max_size=6), st.sampled_from(["", " ", "s3cr", "://", "https:/"]))
def test_a_secret_cut_at_any_place_is_hidden_and_nothing_else_is_lost(cuts, filler):
    text = f"{filler}one {SECRET} two https://me:passw0rd@host {filler}{SECRET}{SECRET} s3cr"
    stream, shown = StreamRedactor(Redactor(ENVIRON)), ""
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(borders):
        shown += stream.feed(text[start:end])
        assert SECRET not in shown
    shown += stream.close()
    assert shown == f"{filler}one [secret] two https://me:[secret]@host {filler}[secret][secret] s3cr"


def test_a_secret_that_begins_with_another_is_hidden_whole_however_it_comes():
    redactor = Redactor({"A_TOKEN": "abcdef", "B_TOKEN": "abcdefghijkl", "C_TOKEN": "zzabcdef"})
    text = "one abcdefghijkl two abcdef three zzabcdef four"
    wanted = "one [secret] two [secret] three [secret] four"
    for size in range(1, 20):
        stream = StreamRedactor(redactor)
        pieces = [stream.feed(text[start : start + size]) for start in range(0, len(text), size)]
        assert "".join([*pieces, stream.close()]) == wanted, size


@pytest.mark.parametrize(
    "name", ["SSHPASS", "DB_PASS", "GPG_PASSPHRASE", "AZURE_STORAGE_CONNECTION_STRING", "SENTRY_DSN"]
)
def test_names_of_secrets_that_say_so_otherwise(name):
    assert Redactor({name: "value-of-it"}).text("is value-of-it") == "is [secret]"
