import subprocess
from pathlib import Path

import pytest

from fvc_lib import CHECKOUT
from fvc_lib.execution.slurm import Site, read_site
from fvc_lib.services.errors import UsageError


def site_file(folder: Path, text: str) -> Path:
    path = folder / "site.conf"
    path.write_text(text)
    return path


def test_the_file_of_the_checkout_says_what_the_code_takes_for_granted():
    assert read_site(CHECKOUT / "slurm" / "site.conf") == Site()


def test_the_file_of_the_checkout_explains_every_setting_there_is():
    text = (CHECKOUT / "slurm" / "site.conf").read_text()
    named = {line.split("=")[0].lower() for line in text.splitlines() if "=" in line and not line.startswith("#")}
    assert named == set(Site.model_fields) - {"path"}


def test_bash_and_python_read_the_same(tmp_path):
    text = (
        "ACCOUNT=me_42  # a comment\nTIME=1-02:00:00\nCPUS=7\nMEMORY=\n"
        "EXTRA='--mail-type=END,FAIL --comment=\"two words\" --licenses=a:2'\n"
        "SETUP='module load cuda/12.4; export A=\"$HOME x\"\nulimit -c 0'\n"
        'PYTHON="/opt/a b/python"\n'
    )
    path = site_file(tmp_path, text)
    site = read_site(path)
    names = ("ACCOUNT", "TIME", "CPUS", "MEMORY", "EXTRA", "SETUP", "PYTHON")
    shown = "".join(f"printf '%s\\0' \"${name}\"; " for name in names)
    bash = subprocess.run(["bash", "-c", f'source "$0"; {shown}', path], capture_output=True, text=True, check=True)
    account, time, cpus, memory, extra, setup, python = bash.stdout.split("\0")[:-1]
    assert (site.account, site.time, str(site.cpus), site.setup, site.python) == (account, time, cpus, setup, python)
    assert (memory, site.memory) == ("", 4096)
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {extra}"], capture_output=True, text=True, check=True)
    assert site.extra == tuple(words.stdout.split("\0")[:-1])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ACOUNT=me\n", "ACCOUNT"),
        ("CPUS=two\n", "CPUS"),
        ("TIME=tomorrow\n", "TIME"),
        ("TIME=240\n", "TIME"),
        ("TIME=00:02:00\n", "SIGNAL_SECONDS"),
        ("MEMORY=4G\n", "MEMORY"),
        ("EXTRA='-C avx'\n", "EXTRA"),
        ("EXTRA='--comment=\"a'\n", "EXTRA"),
        ("ACCOUNT='me\n", ""),
        ("partition=main\n", "partition"),
    ],
)
def test_a_wrong_setting_is_refused_with_file_and_name(tmp_path, text, named):
    with pytest.raises(UsageError) as refused:
        read_site(site_file(tmp_path, text))
    assert named in str(refused.value)
    assert str(tmp_path / "site.conf") in str(refused.value)
