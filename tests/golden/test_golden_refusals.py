"""The refusals that save most time: exit code, and the file, field and remedy that the message names."""

import pytest

from tests.golden.golden_runs import run

pytestmark = pytest.mark.long


INPUTS = {
    "one_class/real/a.mp4": "not a video",
    "missing.csv": "path,label\nno_such_1.mp4,real\nno_such_2.mp4,fake\n",
    "no_label.csv": "path\na.mp4\n",
    "outside.csv": "path,label\n../a.mp4,real\n../b.mp4,fake\n",
    "unknown_label.csv": "path,label\na.mp4,maybe\nb.mp4,perhaps\n",
    "text.yaml": "epochs: many\n",
    "unknown.yaml": "epoch: 3\n",
    "scores.csv": "video,score\na,0.5\n",
    "net.py": "import torch\n\nclass Net(torch.nn.Module):\n    pass\n",
}
# Arguments ({} is the folder of the inputs), exit code, and words of which each must be in the message.
REFUSALS = [
    (("-p", "epochs", "many"), 2, ["epochs", "many"]),
    (("-p", "epoch", "3"), 2, ["epoch", "epochs"]),
    (("-p", "epochs", "-1"), 2, ["epochs", "-1"]),
    (("-p", "learning_rate", "0"), 2, ["learning_rate"]),
    (("-p", "model", "efficientnet"), 2, ["model", "efficientnet_lite0"]),
    (("-p", "model", "{}/net.py:Absent"), 2, ["net.py", "Absent"]),
    (("-p", "num_folds", "1"), 2, ["num_folds"]),
    (("-p", "protocol", "kfolds"), 2, ["protocol", "kfold"]),
    (("--params", "{}/text.yaml"), 2, ["text.yaml", "epochs", "many"]),
    (("--params", "{}/unknown.yaml"), 2, ["unknown.yaml", "epoch", "epochs"]),
    (("--params", "{}/absent.yaml"), 2, ["absent.yaml"]),
    (("-p", "corpus", "{}/absent"), 2, ["absent"]),
    (("-p", "corpus", "{}/empty"), None, ["empty"]),
    (("-p", "corpus", "{}/one_class"), None, ["fake"]),
    (("-p", "corpus", "{}/missing.csv"), None, ["missing.csv"]),
    (("-p", "corpus", "{}/no_label.csv"), None, ["no_label.csv", "label"]),
    (("-p", "corpus", "{}/unknown_label.csv"), None, ["label_map"]),
    (("-p", "corpus", "{}/outside.csv"), None, ["allow_outside"]),
    (("--resume", "run_that_is_not_there"), 2, ["run_that_is_not_there"]),
    (("predict", "{}/bundle", "{}/net.py"), None, ["bundle"]),
    (("audit", "{}/scores.csv"), None, ["scores.csv", "label"]),
    (("compare", "only_one"), 2, []),
    (("--only", "99"), 2, ["99"]),
]


@pytest.mark.parametrize(("arguments", "code", "words"), REFUSALS, ids=lambda value: str(value)[:60])
def test_a_refusal_names_what_and_the_remedy(arguments, code, words, tmp_path):
    for place in ("empty", "one_class/real", "bundle"):
        (tmp_path / place).mkdir(parents=True)
    for name, text in INPUTS.items():
        (tmp_path / name).write_text(text)
    found, shown = run(tmp_path / "here", *(argument.replace("{}", str(tmp_path)) for argument in arguments))
    assert found in ({code} if code else {2, 3}), shown
    assert [word for word in words if word not in shown] == []
    assert "Traceback" not in shown
    assert not list((tmp_path / "here").rglob("run_*")), "a refusal leaves no run"
