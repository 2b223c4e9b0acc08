import io

import av
import numpy as np

from fvc_lib.video.clips.store import contact_sheet


def test_rows_are_clips_and_columns_are_frames():
    clips = np.random.default_rng(0).integers(0, 200, (2, 3, 3, 4, 5)).astype(np.uint8)
    with av.open(io.BytesIO(contact_sheet(clips, gap=2))) as container:  # another decoder
        (frame,) = container.decode(video=0)
    cells = np.full((2, 3, 3, 6, 7), 255)
    cells[..., :4, :5] = clips
    wanted = cells.transpose(0, 3, 1, 4, 2).reshape(2 * 6, 3 * 7, 3)
    np.testing.assert_array_equal(frame.to_ndarray(format="rgb24"), wanted)
