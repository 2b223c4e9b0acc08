"""Each published layout with enough people, sequences or clips for folds: twelve units of reals and their fakes."""

import json
from pathlib import Path

from tests.corpus.published import text, touch

UNITS = range(12)


def faceforensics(root: Path) -> None:
    pairs = [(f"{2 * k:03d}", f"{2 * k + 1:03d}") for k in UNITS]
    for target, source in pairs:
        for name in (target, source):
            touch(root, f"original_sequences/youtube/c23/videos/{name}.mp4")
        touch(root, f"manipulated_sequences/Deepfakes/c23/videos/{target}_{source}.mp4")
        touch(root, f"manipulated_sequences/FaceShifter/c23/videos/{source}_{target}.mp4")
    for part, share in {"train": pairs[:8], "val": pairs[8:10], "test": pairs[10:]}.items():
        text(root, f"splits/{part}.json", [json.dumps(share)])


def dfd(root: Path) -> None:
    for k in UNITS:
        target, source = f"{2 * k + 1:02d}", f"{2 * k + 2:02d}"
        touch(root, f"original_sequences/actors/c23/videos/{target}__kitchen_pan.mp4")
        fakes = "manipulated_sequences/DeepFakeDetection/c23/videos"
        touch(root, f"{fakes}/{target}_{source}__kitchen_pan__A1B2C3D4.mp4")


def celeb_df(root: Path) -> None:
    for k in UNITS:
        touch(root, f"Celeb-real/id{2 * k}_0000.mp4", f"YouTube-real/{k:05d}.mp4")
        touch(root, f"Celeb-synthesis/id{2 * k}_id{2 * k + 1}_0000.mp4")
    text(root, "List_of_testing_videos.txt", ["1 YouTube-real/00000.mp4", "0 Celeb-synthesis/id0_id1_0000.mp4"])


def dfdc(root: Path) -> None:
    rows = {"a.mp4": {"label": "REAL", "split": "train"}, "b.mp4": {"label": "FAKE", "original": "a.mp4"}}
    for k in UNITS:
        touch(root, *(f"dfdc_train_part_{k}/{name}" for name in rows))
        text(root, f"dfdc_train_part_{k}/metadata.json", [json.dumps(rows)])
    touch(root, "test/c.mp4", "test/d.mp4")
    text(root, "test/labels.csv", ["filename,label", "c.mp4,0", "d.mp4,1"])


def dfdc_preview(root: Path) -> None:
    rows = {}
    for k in UNITS:
        one, other = f"{100000 + k}", f"{200000 + k}"
        real = f"original_videos/{one}/{one}_A_000.mp4"
        fake = f"method_A/{one}_{other}/{one}_{other}_A_000.mp4"
        rows[real] = {"label": "real", "set": "train", "target_id": one}
        rows[fake] = {"label": "fake", "set": "train", "target_id": one, "swapped_id": other}
    touch(root, *rows)
    text(root, "dataset.json", [json.dumps(rows)])


def deeperforensics(root: Path) -> None:
    """The fakes alone; the reals are FaceForensics++'s."""
    for k in UNITS:
        touch(root, f"manipulated_videos/end_to_end/{2 * k:03d}_M{100 + k}.mp4")


def fakeavceleb(root: Path) -> None:
    lines = ["source,target1,target2,method,category,type,race,gender,path,"]
    for k in UNITS:
        one, other = f"id{2 * k:05d}", f"id{2 * k + 1:05d}"
        race, sex = ("African", "Asian (East)")[k % 2], ("men", "women")[k // 2 % 2]
        for kind, name, method in (
            ("RealVideo-RealAudio", "00109.mp4", "real"),
            ("RealVideo-FakeAudio", "00020_fake.mp4", "rtvc"),
            ("FakeVideo-FakeAudio", f"00109_{other}_wav2lip.mp4", "wav2lip"),
        ):
            place = f"{kind}/{race}/{sex}/{one}"
            touch(root, f"{place}/{name}")
            target = other if method == "wav2lip" else "-"
            lines.append(f"{one},{target},-,{method},A,{kind},{race},{sex},{name},FakeAVCeleb/{place}")
    text(root, "meta_data.csv", lines)


def genvideo(root: Path) -> None:
    for k in UNITS:
        touch(root, f"GenVideo-Val/Real/{k}.mp4", f"GenVideo-Val/Fake/{('Sora', 'Gen2')[k % 2]}/{k}.mp4")


def genvidbench(root: Path) -> None:
    for k in UNITS:
        touch(root, f"Pair1/vript/vript/{k:011d}-Scene-001.mp4", f"Pair1/pika/pika/{k}_a_boy.mp4")
        touch(root, f"Pair2/hd_vg_130m/{k:05d}_a_boy.mp4", f"Pair2/mora/{k:04d}_a_boy.mp4")


def aigvdbench(root: Path) -> None:
    for k in UNITS:
        clip = f"youtube{k:04d}_3_10to99"
        touch(root, f"Real/{clip}.mp4", f"OpenSource/T2V/CogVideoX/{clip}.mp4", f"ClosedSource/Sora/{clip}.mp4")


def wilddeepfake(root: Path) -> None:
    for k in UNITS:
        touch(root, f"{'real_test' if k < 2 else 'real_train'}/{k}/real/0/video.mp4")
        touch(root, f"{'fake_test' if k < 2 else 'fake_train'}/{k}/fake/0/video.mp4")


def folder(root: Path) -> None:
    for k in UNITS:
        touch(root, f"real/{k}.mp4", f"fake/{k}.mp4")


def fvc2018(root: Path) -> None:
    header = ["cascade_id,video_url,label"]
    rows = [(k, label, f"{label}{k:07d}") for k in UNITS for label in ("real", "fake")]
    lines = [f"{label}_{k},https://www.youtube.com/watch?v={name},{label}" for k, label, name in rows]
    text(root, "FVC.csv", header + lines)
    text(root, "FVC_dup.csv", header)
    touch(root, *(f"videos/{name}.mp4" for _, _, name in rows))


CROWDS = {
    make.__name__: make
    for make in (
        faceforensics, dfd, celeb_df, dfdc, dfdc_preview, deeperforensics, fakeavceleb, genvideo, genvidbench,
        aigvdbench, wilddeepfake, folder, fvc2018,
    )
}  # fmt: skip
