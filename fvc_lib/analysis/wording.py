"""Text for readers: numbers with units and intervals, readable names, and text escaped for figures."""

import math
import re
from html import escape, unescape

from fvc_lib.metrics.declaration import declaration

NOT_RECORDED = "not recorded"
# A command in a sentence: the program up to a bracket, comma, semicolon or the sentence's end, except where the shell
# quotes them, or a parameter with its value.
_COMMAND = re.compile(
    r"(?<![\w/.-])((?:(?:[\w./-]*python3? \S*)?run_notebooks\.py|fvc) "
    r"(?:'[^']*'|[^();,.']|\.(?=\S))*(?:'[^']*'|[^();,.' ])|-p \w+ [\w.:=/+-]*\w)"
)

SOURCE_NAMES = {
    "model": "Model",
    "constant": "Constant guess",
    "metadata_only": "Metadata only",
    "length_only": "Clip length only",
    "shape_only": "Frame shape only",
    "real_source_floor": "Reals from reals (floor)",
    "real_source_control": "Trained on reals from reals (floor)",
    "group_lookup_by_group": "Group lookup, split by group",
    "group_lookup_by_row": "Group lookup, split by row",
    "shuffled_labels": "Model on shuffled labels",
    "majority_class": "Most frequent class",
    "mean_predictor": "Mean predictor",
    "chance": "Chance",
    "most_frequent_caption": "Most frequent caption",
}


def with_commands(text: str) -> str:
    """Return ``text`` as escaped HTML in which commands of this project, such as ``fvc ...``, stand in ``<code>``."""
    parts = [escape(part) for part in _COMMAND.split(text)]
    parts[1::2] = [f"<code>{command}</code>" for command in parts[1::2]]
    return "".join(parts)


def source_name(source: str) -> str:
    """Return the readable name of a source of scores: the model or a control (a simple predictor).

    For example, ``metadata_only`` gives ``Metadata only``. An unknown name is returned with spaces in place of ``_``.
    """
    return SOURCE_NAMES.get(source, source.replace("_", " "))


def metric_name(metric: str) -> str:
    """Return the readable name of a metric.

    Examples: ``ROC AUC`` for ``roc_auc``, and ``MRR, video to text`` for ``video_to_text/mrr``.
    """
    subject, slash, name = metric.rpartition("/")
    declared = declaration(name)
    title = declared.title if declared else name.replace("_", " ")
    unit = " (nats)" if declared and declared.unit == "nats" else ""
    return f"{title}{unit}, {subject_name(subject)}" if slash else f"{title}{unit}"


def better_direction(metric: str) -> str:
    """Return ``lower`` if lower values of the metric are better, else ``higher``. Unknown metrics give ``higher``."""
    declared = declaration(metric)
    return (declared and declared.better) or "higher"


def subject_name(subject: str) -> str:
    """Return the readable name of a metric's subject, the thing that the metric is about.

    Examples: ``text to video`` for ``text_to_video``, and ``calories`` for ``target:calories``.
    """
    if subject == "all":
        return "all classes"
    kind, _, name = subject.partition(":")
    return name if kind in ("target", "class") else subject.replace("_", " ")


def number_text(value: float | None, digits: int = 3) -> str:
    """Return ``value`` with ``digits`` decimals. None gives "not recorded", NaN gives "undefined"."""
    if value is None:
        return NOT_RECORDED
    return "undefined" if math.isnan(value) else f"{value:z.{digits}f}"  # z: never "-0.000"


def interval_text(value: float | None, low: float | None, high: float | None, digits: int = 3) -> str:
    """Return a value with its interval, such as ``0.812 [0.741, 0.880]``, or the value alone without an interval."""
    text = number_text(value, digits)
    if value is None or low is None or high is None or not all(map(math.isfinite, (value, low, high))):
        return text
    return f"{text} [{low:z.{digits}f}, {high:z.{digits}f}]"


def bytes_text(size_bytes: float | None) -> str:
    """Return a number of bytes as text in kB, MB or GB (powers of ten). None and NaN give "not recorded"."""
    if size_bytes is None or not math.isfinite(size_bytes):
        return NOT_RECORDED
    if size_bytes >= 1e9:
        return f"{size_bytes / 1e9:.2f} GB"
    if size_bytes >= 1e6:
        return f"{size_bytes / 1e6:.0f} MB"
    return f"{size_bytes / 1e3:.3g} kB"


def megabytes_text(megabytes: float | None) -> str:
    """Return a number of megabytes (1e6 bytes) as text, such as ``629 MB``. From 1000 MB on, the text is in GB."""
    return bytes_text(None if megabytes is None else megabytes * 1e6)


def duration_text(seconds: float | None) -> str:
    """Return a duration in seconds as text such as ``42 s``, ``3 min 05 s`` or ``2 h 14 min``.

    None, NaN and negative numbers give "not recorded".
    """
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return NOT_RECORDED
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes} min {left:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def time_text(utc: str | None) -> str:
    """Return ``2025-03-04 10:15 UTC`` for ``2025-03-04T10:15:00Z``. None gives "not recorded"."""
    return f"{utc[:16].replace('T', ' ')} UTC" if utc else NOT_RECORDED


def count_text(count: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun, such as ``1 video``, ``2 videos`` or ``12,000 videos``.

    ``one`` is the noun in the singular, and ``many`` in the plural. If ``many`` is None, the plural is ``one`` with an
    "s".
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def clean_text(text: object) -> str:
    """Return ``text`` on one line. Lone surrogates and control characters become backslash escapes."""
    line = " ".join(str(text).split())
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return shown.encode("utf-8", "backslashreplace").decode()


def plain_text(text: object) -> str:
    """Return the text of a plotly figure as plain text.

    ``<br>`` becomes a line break, other tags are removed, and entities such as ``&amp;`` become characters.
    """
    return unescape(re.sub(r"<[^>]*>", "", str(text).replace("<br>", "\n")))


def figure_text(text: object) -> str:
    """Return ``text`` escaped for titles, names and ticks of plotly figures, which interpret HTML tags and entities."""
    return escape(clean_text(text), quote=False)
