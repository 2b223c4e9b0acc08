import numpy as np

from fvc_lib.video.clips.store import contact_sheet


def test_rows_are_clips_and_columns_are_frames():
    short = np.full((2, 3, 4, 5), 10, np.uint8)
    long = np.arange(3, dtype=np.uint8).repeat(3 * 4 * 5).reshape(3, 3, 4, 5)
    sheet = contact_sheet([short, long], gap=2, background=77)
    assert sheet.shape == (10, 3 * 5 + 2 * 2, 3)
    assert (sheet[:4, :5] == 10).all()
    assert (sheet[:4, 14:] == 77).all()  # the shorter clip leaves its last column free
    assert (sheet[4:6] == 77).all()
    for number in range(3):
        assert (sheet[6:, 7 * number : 7 * number + 5] == number).all()
