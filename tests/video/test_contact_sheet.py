import av
import numpy as np

from fvc_lib.video.clips.store import contact_sheet


def test_rows_are_clips_and_columns_are_frames(tmp_path):
    clips = np.random.default_rng(0).integers(0, 200, (2, 3, 3, 4, 5)).astype(np.uint8)
    path = tmp_path / "sheet.png"
    path.write_bytes(contact_sheet(clips, gap=2))
    with av.open(str(path)) as container:  # another decoder
        (frame,) = container.decode(video=0)
    sheet = frame.to_ndarray(format="rgb24")
    assert sheet.shape == (2 * 6, 3 * 7, 3)
    for row, clip in enumerate(clips):
        for column, picture in enumerate(clip):
            cell = sheet[6 * row : 6 * row + 6, 7 * column : 7 * column + 7]
            np.testing.assert_array_equal(cell[:4, :5], picture.transpose(1, 2, 0))
            assert (cell[4:] == 255).all()
            assert (cell[:, 5:] == 255).all()
