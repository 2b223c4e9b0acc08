"""Find pictures that are frames of one video, and files that are parts of one longer video, by their names."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from functools import partial
from posixpath import splitext

from fvc_lib.video.decode.file_parts import PICTURES

_VIDEO_ENDINGS = (
    "3g2 3gp 264 265 amv asf avi divx dv f4v flv gif h264 h265 hevc ivf m1v m2ts m4s m2v m4v mjpeg mjpg mkv mov mp4 "
    "mpe mpeg mpg mts mxf nut obu ogg ogv qt rm rmvb ts vob webm wmv y4m"
)
_IMAGE_ENDINGS = "avif bmp gif jfif jpe jpeg jpg mpo pgm png ppm tif tiff webp"
ENDINGS = {
    "video": frozenset(f".{ending}" for ending in _VIDEO_ENDINGS.split()),
    "image": frozenset(f".{ending}" for ending in _IMAGE_ENDINGS.split()),
}
LAYOUT = "Frames of a video are read from a folder of their own: real/VIDEO/000.png or .jpg"
LABEL_FOLDER = re.compile(r"(?:\d+[_-])?(real|fake)", re.IGNORECASE)
_DIGITS = re.compile(r"\d+", re.ASCII)
_PARTS = re.compile(
    r"(?<=[^/_\-. ])(?:[_\-. ]+(?:seg|segment|shot|scene|crop|frame|clip|part)[_-]?\d+)+$", re.IGNORECASE | re.ASCII
)


def is_picture(name: str) -> bool:
    """Return whether the extension of ``name`` is that of a still picture; a GIF counts as a video."""
    return splitext(name)[1].lower() in ENDINGS["image"] - ENDINGS["video"]


def picture_folders(
    paths: Sequence[str],
    facts: Sequence[Hashable],
    words: Iterable[str] = (),
    names_in: Callable[[str], Iterable[str]] = lambda folder: (),
) -> Iterator[tuple[str, list[int], str]]:
    """Yield (folder, positions, problem) for each folder that holds pictures.

    ``positions`` are the indices of its pictures in ``paths``. ``problem`` says why they are not the frames of one
    video; it is the empty text if they are.

    Args:
        paths: paths of pictures and other files; the others are skipped.
        facts: the known facts of each path, such as its label; frames of one video must have equal facts.
        words: labels as the label source writes them. If the folders are named by these words, they are folders of a
            label and hold many videos, as folders called real and fake do.
        names_in: called with a folder; returns the names of further files in it.
    """
    folders = defaultdict[str, list[int]](list)
    for place, path in enumerate(paths):
        if is_picture(path):
            folders[path.rpartition("/")[0]].append(place)
    own = {folder.rpartition("/")[2] for folder in folders}
    of_labels = {name for name in own if not name or LABEL_FOLDER.fullmatch(name) or name.lower().endswith(".tar")}
    of_labels = (
        own if {name.lower() for name in own - of_labels} <= {word.strip().lower() for word in words} else of_labels
    )
    for folder, places in folders.items():
        problem = _why_no_sequence({*(paths[place].rpartition("/")[2] for place in places), *names_in(folder)})
        if folder.rpartition("/")[2] in of_labels:
            problem = "lie in no folder of their own video"
        problem = problem or _several(facts, places)
        yield folder, places, problem and f"the pictures in {folder!r} {problem}"


def part_families(paths: Sequence[str], facts: Sequence[Hashable]) -> Iterator[tuple[str, list[int], str]]:
    """Yield (video, positions, problem) for each video of which several paths name parts.

    The names of parts differ in a suffix such as ``_seg3``; a number alone is no such suffix. ``positions`` are the
    indices of the parts in ``paths``. ``problem`` says why they cannot be parts of one video; it is empty if they can.
    """
    families = defaultdict[str, list[int]](list)
    names = list(map(_bare_and_whole, paths))
    for place, (_, whole) in enumerate(names):
        families[whole].append(place)
    for whole, places in families.items():
        # Without a part they are files of one name in several formats, as a.mp4 and a.avi.
        if len({paths[place] for place in places}) > 1 and any(names[place][0] != whole for place in places):
            problem = _several(facts, places)
            yield whole, places, problem and f"the parts of {whole!r} {problem}"


def videos_of(paths: Sequence[str], facts: Sequence[Hashable], words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return (videos, problems), one of each per path.

    The video of a frame is its folder, that of a part is the common name, and that of any other file is its own path.
    A problem says why frames or parts could not be joined; it is empty if there is none. For the arguments see
    ``picture_folders``.
    """
    videos, problems = list(paths), [""] * len(paths)
    for find in (partial(picture_folders, words=words), part_families):
        for whole, places, problem in list(find(videos, facts)):
            for place in places:
                videos[place], problems[place] = videos[place] if problem else whole, problem
    return videos, problems


def _bare_and_whole(path: str) -> tuple[str, str]:
    """Return the path without its extension, and without the suffix of a part.

    ``a/talk_seg3.mp4`` gives ``("a/talk_seg3", "a/talk")``.
    """
    stem, ending = splitext(path)
    bare = stem if ending.lower() in ENDINGS["image"] | ENDINGS["video"] else path
    whole = _PARTS.sub("", bare)
    return bare, bare if LABEL_FOLDER.fullmatch(whole.rpartition("/")[2]) else whole


def _several(facts: Sequence[Hashable], places: Sequence[int]) -> str:
    return "differ in label, group or another stated fact" if len({facts[place] for place in places}) > 1 else ""


def _why_no_sequence(names: Collection[str]) -> str:
    """Return why ``names`` are not the names of a video's frames; empty if they are.

    Names of frames differ only in numbers, and one of these numbers is different in every name.
    """
    if other := next((name for name in sorted(names) if not name.lower().endswith(PICTURES)), ""):
        return f"are not all PNG or JPEG, such as {other!r}"
    stems = [splitext(name)[0] for name in names]
    if len({_DIGITS.sub("0", stem) for stem in stems}) > 1:
        return f"have names that differ in more than numbers, such as {min(names)!r} and {max(names)!r}"
    numbers = zip(*([digits.lstrip("0") for digits in _DIGITS.findall(stem)] for stem in stems), strict=True)
    if len(stems) > 1 and not any(len(set(each)) == len(stems) for each in numbers):
        return "have names in which no number counts them"
    return ""
