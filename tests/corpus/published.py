"""Miniatures of published corpora, in the exact layouts of their releases: paths, and the corpora's own lists."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

Make = Callable[[Path], None]


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")


def text(root: Path, name: str, lines: Iterable[str]) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def faceforensics(root: Path) -> None:
    """Four sequences; 000 and 002 are of one YouTube video, and 002 is tested."""
    for name in ("000", "001", "002", "003"):
        touch(root, f"original_sequences/youtube/c23/videos/{name}.mp4")
    for method in ("Deepfakes", "FaceShifter"):
        touch(root, f"manipulated_sequences/{method}/c23/videos/000_001.mp4")
        touch(root, f"manipulated_sequences/{method}/c40/videos/002_003.mp4")
    touch(root, "manipulated_sequences/Deepfakes/masks/videos/000_001.mp4")
    for part, pairs in {"train": [["000", "001"]], "val": [], "test": [["002", "003"]]}.items():
        text(root, f"splits/{part}.json", [json.dumps(pairs)])
    ids = {"000": "-2Zdu3hMGVw 0", "001": "aaaaaaaaaaa 0", "002": "-2Zdu3hMGVw 1", "003": "bbbbbbbbbbb 0"}
    text(root, "conversion_dict.json", [json.dumps(ids)])


def dfd(root: Path) -> None:
    touch(
        root,
        "original_sequences/actors/c23/videos/01__kitchen_pan.mp4",
        "original_sequences/actors/c23/videos/02__outside_talking.mp4",
        "original_sequences/actors/c23/videos/03__outside_talking.mp4",
        "manipulated_sequences/DeepFakeDetection/c23/videos/01_02__kitchen_pan__A1B2C3D4.mp4",
    )


def celeb_df(root: Path) -> None:
    touch(root, "Celeb-real/id0_0000.mp4", "Celeb-real/id1_0000.mp4", "Celeb-real/id2_0003.mp4")
    touch(root, "YouTube-real/00170.mp4", "YouTube-real/00171.mp4")
    touch(root, "Celeb-synthesis/id0_id1_0000.mp4")
    text(root, "List_of_testing_videos.txt", ["1 YouTube-real/00170.mp4", "0 Celeb-synthesis/id0_id1_0000.mp4"])


def dfdc(root: Path) -> None:
    rows = {"a.mp4": {"label": "REAL", "split": "train"}, "b.mp4": {"label": "FAKE", "original": "a.mp4"}}
    for part in (0, 1):
        touch(root, *(f"dfdc_train_part_{part}/{name}" for name in rows))
        text(root, f"dfdc_train_part_{part}/metadata.json", [json.dumps(rows)])
    touch(root, "test/c.mp4", "test/d.mp4")
    text(root, "test/labels.csv", ["filename,label", "c.mp4,0", "d.mp4,1"])


def dfdc_tested_by_metadata(root: Path) -> None:
    """The test part with a metadata.json in place of labels.csv."""
    dfdc(root)
    (root / "test/labels.csv").unlink()
    rows = {"c.mp4": {"is_fake": 0, "augmentations": {}}, "d.mp4": {"is_fake": 1, "augmentations": {"blur": {}}}}
    text(root, "test/metadata.json", [json.dumps(rows)])


def dfdc_preview(root: Path) -> None:
    real = "original_videos/643786/643786_A_000.mp4"
    fake = "method_A/643786_1460296/643786_1460296_A_000.mp4"
    touch(root, real, fake, "original_videos/999999/999999_B_000.mp4")
    rows = {
        real: {"label": "real", "set": "train", "target_id": "643786"},
        fake: {"label": "fake", "set": "train", "target_id": "643786", "swapped_id": "1460296"},
        "original_videos/999999/999999_B_000.mp4": {"label": "real", "set": "test"},
    }
    text(root, "dataset.json", [json.dumps(rows)])


def deeperforensics(root: Path) -> None:
    touch(root, "manipulated_videos/end_to_end/000_M101.mp4", "manipulated_videos/reenact_postprocess/001_M101.mp4")
    touch(root, "manipulated_videos/end_to_end/002_W102.mp4", "source_videos/M101/a.mp4")
    for part, names in {"train": ["000_M101.mp4"], "val": ["001_M101.mp4"], "test": ["002_W102.mp4"]}.items():
        text(root, f"lists/splits/{part}.txt", names)


def fakeavceleb(root: Path) -> None:
    real, fake = "RealVideo-RealAudio/African/men/id00076", "FakeVideo-RealAudio/African/men/id00076"
    touch(root, f"{real}/00109.mp4", f"{fake}/00109_id00166_faceswap.mp4")
    voice = "RealVideo-FakeAudio/Asian (East)/women/id00200"
    touch(root, f"{voice}/00020_fake.mp4")
    text(
        root,
        "meta_data.csv",
        [
            "source,target1,target2,method,category,type,race,gender,path,",
            f"id00076,-,-,real,A,RealVideo-RealAudio,African,men,00109.mp4,FakeAVCeleb/{real}",
            f"id00076,id00166,-,faceswap,B,FakeVideo-RealAudio,African,men,00109_id00166_faceswap.mp4,FakeAVCeleb/{fake}",
            f"id00200,-,-,rtvc,C,RealVideo-FakeAudio,Asian (East),women,00020_fake.mp4,FakeAVCeleb/{voice}",
            f"id00076,id00166,id00200,wav2lip,B,FakeVideo-RealAudio,African,men,gone.mp4,FakeAVCeleb/{fake}",
        ],
    )


def genvideo(root: Path) -> None:
    touch(root, "GenVideo-Val/Real/a.mp4", "GenVideo-Val/Fake/Sora/b.mp4", "GenVideo-Val/Fake/Gen2/c.mp4")
    touch(root, "train/Real/d.mp4", "train/Fake/ZeroScope/e.mp4")


def genvideo_in_the_root_too(root: Path) -> None:
    """A training archive that was unpacked beside the test part; one generator is called like the folder of reals."""
    touch(root, "GenVideo-Val/Real/a.mp4", "GenVideo-Val/Fake/Sora/b.mp4", "GenVideo-Val/Fake/Gen2/c.mp4")
    touch(root, "Real/d.mp4", "Fake/ZeroScope/e.mp4", "Fake/Real/f.mp4")


def genvidbench(root: Path) -> None:
    touch(root, "Pair1/vript/vript/-2Zdu3hMGVw-Scene-001.mp4", "Pair1/vript/vript/-2Zdu3hMGVw-Scene-002.mp4")
    touch(root, "Pair1/pika/a.mp4", "Pair2/hd_vg_130m/00001_a_boy_x.mp4", "Pair2/cogvideo/cogvideo/0001_x.mp4")
    touch(root, "Pair2/hd_vg_130m/-2Zdu3hMGVw_3_10to99.mp4", "Pair2/mora/0001_y.mp4", "Pair2/mora/0002_y.mp4")
    text(root, "Pair1_labels.txt", ["Pair1/pika/a.mp4 1", "Pair1/vript/vript/-2Zdu3hMGVw-Scene-001.mp4 0"])
    reals, fakes = ["hd_vg_130m/00001_a_boy_x.mp4 0"], ["cogvideo/cogvideo/0001_x.mp4 1", "mora/gone.mp4 1"]
    text(root, "Pair2_labels.txt", [*reals, *fakes])


def aigvdbench(root: Path) -> None:
    clip = "-2Zdu3hMGVw_3_10to99"
    touch(root, f"Real/{clip}.mp4", f"OpenSource/T2V/CogVideoX/{clip}.mp4", f"ClosedSource/Sora/{clip}.mp4")
    touch(root, "Real/aaaaaaaaaaa_1_0to5.mp4")
    text(root, "test.jsonl", [json.dumps({"Video_id": f"{clip}.mp4"})])
    text(root, "val.jsonl", [json.dumps({"Video_id": "-2Zdu3hMGVw_4_10to99.mp4"})])
    text(root, "train.jsonl", [json.dumps({"Video_id": "aaaaaaaaaaa_1_0to5.mp4"})])


def wilddeepfake(root: Path) -> None:
    """Two sequences of one archive, and one of each other part; an archive that is not unpacked."""
    for sequence in ("real_train/1/real/0", "real_train/1/real/12", "fake_train/1/fake/3", "fake_test/7/fake/0"):
        touch(root, *(f"{sequence}/{number}.png" for number in (0, 9, 10)))
    touch(root, "real_test/2/real/5/0.png", "real_test/3.tar.gz", "real_train/1.tar.gz")


MINIATURES: dict[str, Make] = {
    make.__name__: make
    for make in (
        faceforensics, dfd, celeb_df, dfdc, dfdc_tested_by_metadata, dfdc_preview, deeperforensics, fakeavceleb,
        genvideo, genvideo_in_the_root_too, genvidbench, aigvdbench, wilddeepfake,
    )
}  # fmt: skip
