"""Miniatures of published corpora, in the exact layouts of their releases: paths, and the corpora's own lists."""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

Make = Callable[[Path], None]


def touch(root: Path, *names: str | bytes) -> None:
    for name in map(os.fsdecode, names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")


def text(root: Path, name: str, lines: Iterable[str]) -> Path:
    touch(root, name)
    (root / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root / name


# Of FaceForensics++, 000 and 002 are of one YouTube video, and 002 is tested. Of GenVideo, a training archive may be
# unpacked beside the test part, and a generator be called like the folder of reals. Of WildDeepfake, one archive has
# two sequences.
FILES = {
    "faceforensics": """
        manipulated_sequences/Deepfakes/c23/videos/000_001.mp4
        manipulated_sequences/Deepfakes/c40/videos/002_003.mp4
        manipulated_sequences/Deepfakes/masks/videos/000_001.mp4
        manipulated_sequences/FaceShifter/c23/videos/000_001.mp4
        manipulated_sequences/FaceShifter/c40/videos/002_003.mp4
        original_sequences/youtube/c23/videos/000.mp4
        original_sequences/youtube/c23/videos/001.mp4
        original_sequences/youtube/c23/videos/002.mp4
        original_sequences/youtube/c23/videos/003.mp4
    """,
    "dfd": """
        manipulated_sequences/DeepFakeDetection/c23/videos/01_02__kitchen_pan__A1B2C3D4.mp4
        original_sequences/actors/c23/videos/01__kitchen_pan.mp4
        original_sequences/actors/c23/videos/02__outside_talking.mp4
        original_sequences/actors/c23/videos/03__outside_talking.mp4
    """,
    "celeb_df": """
        Celeb-real/id0_0000.mp4
        Celeb-real/id1_0000.mp4
        Celeb-real/id2_0003.mp4
        Celeb-synthesis/id0_id1_0000.mp4
        YouTube-real/00170.mp4
        YouTube-real/00171.mp4
    """,
    "dfdc": """
        dfdc_train_part_0/a.mp4
        dfdc_train_part_0/b.mp4
        dfdc_train_part_1/a.mp4
        dfdc_train_part_1/b.mp4
        test/c.mp4
        test/d.mp4
    """,
    "dfdc_tested_by_metadata": """
        dfdc_train_part_0/a.mp4
        dfdc_train_part_0/b.mp4
        dfdc_train_part_1/a.mp4
        dfdc_train_part_1/b.mp4
        test/c.mp4
        test/d.mp4
    """,
    "dfdc_preview": """
        method_A/643786_1460296/643786_1460296_A_000.mp4
        original_videos/643786/643786_A_000.mp4
        original_videos/999999/999999_B_000.mp4
    """,
    "deeperforensics": """
        manipulated_videos/end_to_end/000_M101.mp4
        manipulated_videos/end_to_end/002_W102.mp4
        manipulated_videos/reenact_postprocess/001_M101.mp4
        source_videos/M101/a.mp4
    """,
    "fakeavceleb": """
        FakeVideo-RealAudio/African/men/id00076/00109_id00166_faceswap.mp4
        RealVideo-FakeAudio/Asian (East)/women/id00200/00020_fake.mp4
        RealVideo-RealAudio/African/men/id00076/00109.mp4
    """,
    "genvideo": """
        GenVideo-Val/Fake/Gen2/c.mp4
        GenVideo-Val/Fake/Sora/b.mp4
        GenVideo-Val/Real/a.mp4
        train/Fake/ZeroScope/e.mp4
        train/Real/d.mp4
    """,
    "genvideo_in_the_root_too": """
        Fake/Real/f.mp4
        Fake/ZeroScope/e.mp4
        GenVideo-Val/Fake/Gen2/c.mp4
        GenVideo-Val/Fake/Sora/b.mp4
        GenVideo-Val/Real/a.mp4
        Real/d.mp4
    """,
    "genvidbench": """
        Pair1/pika/a.mp4
        Pair1/vript/vript/-2Zdu3hMGVw-Scene-001.mp4
        Pair1/vript/vript/-2Zdu3hMGVw-Scene-002.mp4
        Pair2/cogvideo/cogvideo/0001_x.mp4
        Pair2/hd_vg_130m/-2Zdu3hMGVw_3_10to99.mp4
        Pair2/hd_vg_130m/00001_a_boy_x.mp4
        Pair2/mora/0001_y.mp4
        Pair2/mora/0002_y.mp4
    """,
    "aigvdbench": """
        ClosedSource/Sora/-2Zdu3hMGVw_3_10to99.mp4
        OpenSource/T2V/CogVideoX/-2Zdu3hMGVw_3_10to99.mp4
        Real/-2Zdu3hMGVw_3_10to99.mp4
        Real/aaaaaaaaaaa_1_0to5.mp4
    """,
    "wilddeepfake": """
        fake_test/7/fake/0/0.png
        fake_test/7/fake/0/10.png
        fake_test/7/fake/0/9.png
        fake_train/1/fake/3/0.png
        fake_train/1/fake/3/10.png
        fake_train/1/fake/3/9.png
        real_test/2/real/5/0.png
        real_train/1/real/0/0.png
        real_train/1/real/0/10.png
        real_train/1/real/0/9.png
        real_train/1/real/12/0.png
        real_train/1/real/12/10.png
        real_train/1/real/12/9.png
    """,
    "celeb_df_plus": """
        Celeb-real/id0_0000.mp4
        Celeb-real/id3_0001.mp4
        Celeb-synthesis/FaceReenact/DaGAN/id3_id28_0001.mp4
        Celeb-synthesis/FaceSwap/Celeb-DF/id0_id1_0000.mp4
        Celeb-synthesis/FaceSwap/GHOST/id0_id1_0000.mp4
        Celeb-synthesis/TalkingFace/IP_LAP/id3_0001_test_00004.mp4
        YouTube-real/00170.mp4
    """,
}
TEXTS = {
    "faceforensics": {
        "conversion_dict.json": [
            '{"000": "-2Zdu3hMGVw 0", "001": "aaaaaaaaaaa 0", "002": "-2Zdu3hMGVw 1", "003": "bbbbbbbbbbb 0"}'
        ],
        "splits/test.json": ['[["002", "003"]]'],
        "splits/train.json": ['[["000", "001"]]'],
        "splits/val.json": ["[]"],
    },
    "celeb_df": {
        "List_of_testing_videos.txt": ["1 YouTube-real/00170.mp4", "0 Celeb-synthesis/id0_id1_0000.mp4"],
    },
    "dfdc": {
        "dfdc_train_part_0/metadata.json": [
            '{"a.mp4": {"label": "REAL", "split": "train"}, "b.mp4": {"label": "FAKE", "original": "a.mp4"}}'
        ],
        "dfdc_train_part_1/metadata.json": [
            '{"a.mp4": {"label": "REAL", "split": "train"}, "b.mp4": {"label": "FAKE", "original": "a.mp4"}}'
        ],
        "test/labels.csv": ["filename,label", "c.mp4,0", "d.mp4,1"],
    },
    "dfdc_tested_by_metadata": {
        "dfdc_train_part_0/metadata.json": [
            '{"a.mp4": {"label": "REAL", "split": "train"}, "b.mp4": {"label": "FAKE", "original": "a.mp4"}}'
        ],
        "dfdc_train_part_1/metadata.json": [
            '{"a.mp4": {"label": "REAL", "split": "train"}, "b.mp4": {"label": "FAKE", "original": "a.mp4"}}'
        ],
        "test/metadata.json": [
            '{"c.mp4": {"is_fake": 0, "augmentations": {}}, "d.mp4": {"is_fake": 1, "augmentations": {"blur": {}}}}'
        ],
    },
    "dfdc_preview": {
        "dataset.json": [
            '{"original_videos/643786/643786_A_000.mp4": {"label": "real", "set": "train", "target_id": "643786"},',
            '"method_A/643786_1460296/643786_1460296_A_000.mp4": {"label": "fake", "set": "train", "target_id": "643786", "swapped_id": "1460296"},',  # noqa: E501
            '"original_videos/999999/999999_B_000.mp4": {"label": "real", "set": "test"}}',
        ],
    },
    "deeperforensics": {
        "lists/splits/test.txt": ["002_W102.mp4"],
        "lists/splits/train.txt": ["000_M101.mp4"],
        "lists/splits/val.txt": ["001_M101.mp4"],
    },
    "fakeavceleb": {
        "meta_data.csv": [
            "source,target1,target2,method,category,type,race,gender,path,",
            "id00076,-,-,real,A,RealVideo-RealAudio,African,men,00109.mp4,FakeAVCeleb/RealVideo-RealAudio/African/men/id00076",
            "id00076,id00166,-,faceswap,B,FakeVideo-RealAudio,African,men,00109_id00166_faceswap.mp4,FakeAVCeleb/FakeVideo-RealAudio/African/men/id00076",
            "id00200,-,-,rtvc,C,RealVideo-FakeAudio,Asian (East),women,00020_fake.mp4,FakeAVCeleb/RealVideo-FakeAudio/Asian (East)/women/id00200",  # noqa: E501
            "id00076,id00166,id00200,wav2lip,B,FakeVideo-RealAudio,African,men,gone.mp4,FakeAVCeleb/FakeVideo-RealAudio/African/men/id00076",
        ],
    },
    "aigvdbench": {
        "test.jsonl": ['{"Video_id": "-2Zdu3hMGVw_3_10to99.mp4"}'],
        "train.jsonl": ['{"Video_id": "aaaaaaaaaaa_1_0to5.mp4"}'],
        "val.jsonl": ['{"Video_id": "-2Zdu3hMGVw_4_10to99.mp4"}'],
    },
    "celeb_df_plus": {
        "List_of_testing_videos.txt": [
            "1 YouTube-real/00170.mp4",
            "0 Celeb-synthesis/FaceReenact/DaGAN/id3_id28_0001.mp4",
        ],
    },
}


def make_miniature(name: str, root: Path) -> None:
    touch(root, *map(str.strip, FILES[name].strip().splitlines()))
    for file, lines in TEXTS.get(name, {}).items():
        text(root, file, lines)


MINIATURES: dict[str, Make] = {name: partial(make_miniature, name) for name in FILES}
