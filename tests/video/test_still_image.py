import io
import pickle
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fvc_lib.video.decode.source import VideoError
from fvc_lib.video.decode.still_image import decode_image, examine_image

# Four quarters of different colours, wider than high: every turn and flip of it is another picture.
QUARTERS = np.zeros((16, 24, 3), dtype=np.uint8)
QUARTERS[:8, :12], QUARTERS[:8, 12:], QUARTERS[8:, :12], QUARTERS[8:, 12:] = (
    (250, 10, 10), (10, 250, 10), (10, 10, 250), (240, 240, 20),
)  # fmt: skip


def textured(height: int = 96, width: int = 128) -> Image.Image:
    generator = np.random.default_rng(0)
    coarse = Image.fromarray(generator.integers(0, 256, (12, 16, 3)).astype(np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray(np.clip(smooth + generator.integers(-9, 9, smooth.shape), 0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def written(folder: Path, content: bytes, name: str = "picture") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_the_picture_is_upright_whatever_the_camera_noted(tmp_path: Path, kind: str) -> None:
    image, exif = Image.fromarray(QUARTERS), Image.Exif()
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95, "subsampling": 0}}.get(kind, {})
    # What a camera stores that was held so that the scene needs this turn to be upright.
    for orientation, undo in {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}.items():
        stored = image if undo is None else image.transpose(Image.Transpose(undo))
        exif[0x0112] = orientation
        path = written(tmp_path, encoded(stored, kind, exif=exif, **options))
        decoded = decode_image(path)
        assert decoded.shape == QUARTERS.shape
        assert np.abs(decoded.astype(int) - QUARTERS).max() <= (40 if kind == "JPEG" else 0)
        facts, _ = examine_image(path)
        assert (facts.width, facts.height) == (24, 16)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("L", "PNG"), ("L", "JPEG"), ("1", "PNG"), ("P", "PNG"), ("P", "GIF"), ("LA", "PNG"), ("RGBA", "PNG"),
     ("CMYK", "JPEG"), ("CMYK", "TIFF"), ("RGB", "BMP"), ("RGB", "PPM"), ("RGBA", "WEBP"), ("I;16", "PNG")],
)  # fmt: skip
def test_every_kind_of_pixels_becomes_rgb(tmp_path: Path, mode: str, kind: str) -> None:
    grey = np.repeat(np.arange(0, 256, 8, dtype=np.uint8)[None], 20, axis=0)
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    image = deep if mode == "I;16" else Image.fromarray(grey).convert("RGB" if mode != "P" else "L").convert(mode)
    decoded = decode_image(written(tmp_path, encoded(image, kind)))
    assert (decoded.shape, decoded.dtype) == ((20, 32, 3), np.uint8)
    assert decoded.flags.c_contiguous
    assert decoded.flags.writeable
    if mode != "1":
        assert np.abs(decoded.mean(axis=2) - grey).max() <= 8


def test_transparent_parts_are_white_in_every_form_of_transparency(tmp_path: Path) -> None:
    rgba = np.array([[[0, 0, 0, 0], [200, 30, 30, 255], [200, 30, 30, 128]]], dtype=np.uint8)
    palette = Image.fromarray(np.array([[0, 1]], dtype=np.uint8)).convert("P")
    palette.putpalette([9, 9, 9, 7, 80, 7])
    keyed = np.array([[[1, 2, 3], [4, 5, 6]]], dtype=np.uint8)
    for content, wanted in (
        (encoded(Image.fromarray(rgba), "PNG"), [[255, 255, 255], [200, 30, 30], [227, 142, 142]]),
        (encoded(palette, "PNG", transparency=0), [[255, 255, 255], [7, 80, 7]]),
        (encoded(Image.fromarray(keyed), "PNG", transparency=(1, 2, 3)), [[255, 255, 255], [4, 5, 6]]),
    ):
        decoded = decode_image(written(tmp_path, content))[0].astype(int)
        assert np.abs(decoded[:2] - wanted[:2]).max() == 0
        assert np.abs(decoded - wanted).max() <= 1


def test_enough_pixels_are_enough(tmp_path: Path) -> None:
    path = written(tmp_path, encoded(textured(), "JPEG", quality=90))
    sizes = {None: (96, 128), 49: (96, 128), 48: (48, 64), 24: (24, 32), 500: (96, 128)}
    assert {side: decode_image(path, shortest_side=side).shape[:2] for side in sizes} == sizes
    assert (examine_image(path)[0].width, examine_image(path)[0].height) == (128, 96)
    png = written(tmp_path, encoded(textured(), "PNG"), "png")
    assert decode_image(png, shortest_side=24).shape == (96, 128, 3)


def reason_of(read, path: Path) -> str:
    """The reason why ``path`` cannot be read, which the error names and keeps when it is pickled."""
    with pytest.raises(VideoError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return caught.value.reason


@pytest.mark.parametrize("kind", ["JPEG", "progressive JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_a_file_that_was_cut_is_refused(tmp_path: Path, kind: str) -> None:
    content = encoded(textured(), kind.split()[-1], **({"progressive": True} if " " in kind else {}))
    for share in (0.05, 0.5, 0.9, 0.999):
        cut = written(tmp_path, content[: min(int(len(content) * share), len(content) - 2)])
        for read in (decode_image, examine_image):
            assert reason_of(read, cut) in {"truncated", "corrupt", "no_image"}


@pytest.mark.parametrize("progressive", [False, True])
def test_lost_data_of_a_jpeg_are_found(tmp_path: Path, progressive: bool) -> None:
    """Pillow finds a tail of zeros; it fills a lost middle with grey, which the index finds."""
    content = encoded(textured(288, 384), "JPEG", progressive=progressive)
    middle = len(content) // 2
    assert reason_of(decode_image, written(tmp_path, content[:middle] + bytes(len(content) - middle))) == "truncated"
    for without in (content[:middle] + content[middle + 2000 :], content[:middle] + b"\xff\xd9"):
        assert decode_image(written(tmp_path, without)).shape == (288, 384, 3)
        assert reason_of(examine_image, written(tmp_path, without)) == "corrupt"
    examine_image(written(tmp_path, content))


def claiming(side: int) -> bytes:
    """A small PNG whose header states ``side`` x ``side`` pixels."""
    head = encoded(Image.new("1", (9, 9)), "PNG")
    body = b"IHDR" + side.to_bytes(4, "big") * 2 + head[24:29]
    return head[:12] + body + zlib.crc32(body).to_bytes(4, "big") + head[33:]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no_image"),
        (b"<html>404</html>", "no_image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no_image"),
        (claiming(9_000), "refused"),
        (claiming(60_000), "refused"),
        (encoded(Image.fromarray(np.ones((4, 4), dtype=np.float32)), "TIFF"), "refused"),
    ],
)
def test_what_is_no_picture_or_too_large_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    assert reason_of(decode_image, written(tmp_path, content)) == reason
    assert reason_of(decode_image, tmp_path / "gone.jpg") == "unreadable"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_a_changed_file_is_read_or_refused_and_what_the_index_takes_can_be_read(tmp_path: Path, kind: str) -> None:
    content = encoded(textured(24, 32), kind)
    for seed in range(25):
        generator, changed = random.Random(seed), bytearray(content)
        for _ in range(1 + seed % 4):
            changed[generator.randrange(min(len(changed), 200))] = generator.randrange(256)
        path = written(tmp_path, bytes(changed))
        try:
            facts, _ = examine_image(path)
        except VideoError:
            continue
        assert decode_image(path).shape == (facts.height, facts.width, 3)
