import struct
from fractions import Fraction

import av
import numpy as np
import pytest
from av.video.reformatter import Interpolation
from hypothesis import given, strategies as st

from fvc_lib.video.decode.pixels import FrameConverter, Orientation, fit

ONE = 1 << 16
EXACT = (
    Interpolation.BICUBIC
    | Interpolation.ACCURATE_RND
    | Interpolation.FULL_CHR_H_INT
    | Interpolation.FULL_CHR_H_INP
    | Interpolation.BITEXACT
)
TURNS = {  # the four corners of ISO/IEC 14496-12's matrix {a, b, c, d}: x' = a x + c y, y' = b x + d y
    (ONE, 0, 0, ONE): (0, lambda p: p),
    (0, ONE, -ONE, 0): (90, lambda p: np.rot90(p, -1, (-2, -1))),
    (-ONE, 0, 0, -ONE): (180, lambda p: np.rot90(p, 2, (-2, -1))),
    (0, -ONE, ONE, 0): (270, lambda p: np.rot90(p, 1, (-2, -1))),
    (-ONE, 0, 0, ONE): (0, lambda p: p[..., ::-1]),
    (ONE, 0, 0, -ONE): (180, lambda p: p[..., ::-1, :]),
    (0, ONE, ONE, 0): (270, lambda p: p.swapaxes(-1, -2)),
    (0, -ONE, -ONE, 0): (90, lambda p: np.rot90(p, 2, (-2, -1)).swapaxes(-1, -2)),
}


@pytest.mark.parametrize("corners", TURNS)
def test_each_display_matrix_turns_pixels_as_the_standard_says(corners):
    a, b, c, d = corners
    degrees, expected = TURNS[corners]
    orientation = Orientation.from_display_matrix(struct.pack("9i", a, b, 0, c, d, 0, 0, 0, 1 << 30))
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    np.testing.assert_array_equal(orientation.apply(pixels), expected(pixels))
    assert orientation.rotation_degrees == degrees


@pytest.mark.parametrize(
    ("corners", "degrees"),
    [((0, 0, 0, 0), 0), ((9000, 60000, -60000, 9000), 90), ((-(1 << 31), 1, 1, -(1 << 31)), 180)],
)
def test_nonsense_and_slanted_matrices_are_rounded(corners, degrees):
    a, b, c, d = corners
    matrix = struct.pack("9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    assert Orientation.from_display_matrix(matrix).rotation_degrees == degrees


@given(
    st.fractions(Fraction(1, 10), 8000, max_denominator=50),
    st.fractions(Fraction(1, 10), 8000, max_denominator=50),
    st.integers(1, 600),
    st.integers(1, 600),
)
def test_the_picture_fits_touches_two_sides_and_keeps_its_aspect(display_width, display_height, width, height):
    box = fit(display_width, display_height, width, height)
    assert 1 <= box.width <= width
    assert 1 <= box.height <= height
    assert box.width == width or box.height == height
    assert box.left in ((width - box.width) // 2, (width - box.width + 1) // 2)
    assert box.top in ((height - box.height) // 2, (height - box.height + 1) // 2)
    scale = min(width / display_width, height / display_height)
    assert abs(box.width - max(1, display_width * scale)) <= Fraction(1, 2)
    assert abs(box.height - max(1, display_height * scale)) <= Fraction(1, 2)


@pytest.mark.parametrize("colour", [(16, 128, 128), (235, 128, 128), (126, 128, 128), (81, 90, 240), (145, 54, 34)])
@pytest.mark.parametrize("size", [None, 40])
def test_colours_are_those_of_the_standard_within_one_level(colour, size):
    """A flat limited-range BT.601 frame against the formula of ITU-R BT.601: packed rgb24 would be 1.5 levels dark."""
    y, u, v = colour
    frame = av.VideoFrame(48, 48, "yuv420p")
    for plane, value in zip(frame.planes, colour, strict=True):
        plane.update(bytes([value]) * plane.buffer_size)
    frame.colorspace, frame.color_range = 5, 1
    converter = FrameConverter(size, None)
    out = np.empty((3, *converter.output_shape(frame)), np.uint8)
    converter.convert(frame, out)
    luma, blue, red = (y - 16) * 255 / 219, (u - 128) * 255 / 224, (v - 128) * 255 / 224
    exact = (luma + 1.402 * red, luma - 0.344136 * blue - 0.714136 * red, luma + 1.772 * blue)
    for channel, value in enumerate(exact):
        assert np.abs(out[channel].astype(float) - min(255, max(0, value))).max() <= 1


@pytest.mark.parametrize("pixel_format", ["yuv420p", "yuv444p", "yuv420p10le"])
@pytest.mark.parametrize(("width", "height", "size"), [(1280, 720, 224), (640, 428, 112)])
def test_scaling_keeps_to_an_accurate_conversion_and_resize(pixel_format, width, height, size):
    """At most 0.35 grey levels of mean difference, of which 0.22 to 0.25 are the rounding to whole levels, and no bias.

    For colours inside the RGB cube: those outside are clipped after the resize here and before it in the reference.
    """
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    coarse = rng.integers(60, 190, (height // 16 + 2, width // 16 + 2, 3)).astype(np.float32)
    smooth = torch.nn.functional.interpolate(
        torch.from_numpy(coarse.transpose(2, 0, 1))[None], (height, width), mode="bilinear", align_corners=True
    )
    rgb = (smooth[0].numpy().transpose(1, 2, 0) + rng.integers(-4, 5, (height, width, 1))).astype(np.uint8)
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24").reformat(format=pixel_format)
    accurate = frame.reformat(format="gbrp", interpolation=int(EXACT)).to_ndarray(format="gbrp").transpose(2, 0, 1)
    converter = FrameConverter(size, None)
    out = np.empty((3, size, size), np.uint8)
    converter.convert(frame, out)
    box = converter.content_box(frame)
    given = torch.from_numpy(accurate.astype(np.float32))[None]
    expected = torch.nn.functional.interpolate(
        given, (box.height, box.width), mode="bilinear", antialias=True, align_corners=False
    )
    difference = box.cut(out).astype(np.float32) - expected[0].numpy()
    assert np.abs(difference).mean() <= 0.35
    assert abs(difference.mean()) <= 0.02
