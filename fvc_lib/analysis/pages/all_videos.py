"""The report's table of all tested videos: sorted, searched and turned over in the page itself, which loads nothing."""

import json

import polars as pl
from markupsafe import Markup

from fvc_lib.analysis.read.records import read_tables
from fvc_lib.analysis.wording import clean_text
from fvc_lib.services.run_paths import RunPaths
from fvc_lib.services.tables import SCORES, VIDEO_FRAMES

PAGE_ROWS = 50  # at once; a browser of a phone turns over 10,000 rows in a moment, and lays out 50


def videos_data(run: RunPaths) -> tuple[Markup, int, int]:
    """JSON of the run's scores for the page's script, how many videos it has, and of how many there are frames.

    Empty, 0 and 0 where there are no scores (``tables/scores.csv``) or they cannot be read.
    """
    scores = read_tables([("", run.scores)], SCORES).frame
    if scores.is_empty():
        return Markup(), 0, 0
    frames = read_tables([("", run.video_frames)], VIDEO_FRAMES).frame
    strips = dict(frames.select("video_id", "jpeg_base64").iter_rows())
    numbers = [pl.col(name).round(4) for name in ("score", "score_std", "threshold")]
    shown = scores.select("path", "label", *numbers, "fold", "group_id", "is_right", "video_id")
    rows, pictures = [], {}
    for place, (path, *values, group, is_right, video_id) in enumerate(shown.iter_rows()):
        rows.append([clean_text(path), *values, clean_text(group), int(is_right)])
        if video_id in strips:
            pictures[place] = strips[video_id]
    text = json.dumps({"rows": rows, "frames": pictures, "page": PAGE_ROWS}, separators=(",", ":"))
    # Within a script element, whatever a path is called.
    return Markup(text.replace("<", "\\u003c").replace("\u2028", " ").replace("\u2029", " ")), len(rows), len(pictures)
