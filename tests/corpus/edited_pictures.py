"""What people do to a picture before they file it again."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

from fvc_lib.corpus.copies.perceptual_hash import perceptual_hash
from fvc_lib.corpus.samples.drawings import photograph, plan_dishes


def drawn(count: int) -> list[Image.Image]:
    """Pictures of as many dishes."""
    contents = [photograph(dish, 0) for dish in plan_dishes()[:count]]
    return [Image.open(io.BytesIO(content)).convert("RGB") for content in contents]


def put_picture(path: Path, image: Image.Image) -> None:
    """Write a JPEG of a high quality and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, "JPEG", quality=92)


def saved_anew(image: Image.Image, quality: int = 80) -> Image.Image:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return Image.open(io.BytesIO(stream.getvalue())).convert("RGB")


def cropped(image: Image.Image, share: float) -> Image.Image:
    """As much off the left and the bottom."""
    width, height = image.size
    return image.crop((round(share * width), 0, width, round((1 - share) * height)))


def signature(image: Image.Image) -> str:
    """What the index keeps of a picture: its hash."""
    return perceptual_hash(np.ascontiguousarray(np.moveaxis(np.asarray(image), -1, 0))[None])


EDITS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "at a low quality": lambda image: saved_anew(image, 30),
    "half the size": lambda image: saved_anew(image.resize((image.width // 2, image.height // 2))),
    "twice the size": lambda image: saved_anew(image.resize((image.width * 2, image.height * 2))),
    "cropped": lambda image: saved_anew(cropped(image, 0.05)),
    "mirrored": lambda image: saved_anew(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
    "mirrored and cropped": lambda image: cropped(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), 0.05),
    "darker": lambda image: saved_anew(ImageEnhance.Brightness(image).enhance(0.6)),
    "more colourful": lambda image: saved_anew(ImageEnhance.Color(image).enhance(1.6)),
    "without colours": lambda image: saved_anew(image.convert("L").convert("RGB")),
}
