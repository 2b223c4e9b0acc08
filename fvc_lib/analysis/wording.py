"""Numbers and names as a reader meets them: units, intervals, and text that stays text whatever it holds."""

import datetime
import math
from collections.abc import Sequence
from html import escape

from fvc_lib.metrics.declaration import declaration

NOT_RECORDED = "not recorded"
UNDEFINED = "undefined"

SOURCE_NAMES = {
    "model": "Model",
    "constant": "Constant guess",
    "metadata_only": "Metadata only",
    "length_only": "Clip length only",
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


def source_name(source: str) -> str:
    """``metadata_only`` as ``Metadata only``; an unknown source in its own words."""
    return SOURCE_NAMES.get(source, source.replace("_", " "))


def metric_name(metric: str) -> str:
    """``roc_auc`` as ``ROC AUC``, ``recall@5`` as ``Recall@5``; an unknown metric in its own words.

    ``video_to_text/mrr`` and ``r2_calories`` say of what they are: ``R², calories``.
    """
    subject, found, name = metric.rpartition("/")
    if found:
        return f"{metric_name(name)}, {subject_name(subject)}"
    declared = declaration(metric)
    if declared is None:
        return metric.replace("_", " ")
    return f"{declared.title} (nats)" if declared.unit == "nats" else declared.title


def better_direction(metric: str) -> str:
    """``lower`` or ``higher``; a metric that is not known here, of a foreign table, counts as the latter."""
    declared = declaration(metric)
    return (declared and declared.better) or "higher"


def subject_name(subject: str) -> str:
    """``text_to_video`` as ``text to video``, ``target:calories`` as ``calories``, ``all`` as ``all classes``."""
    kind, found, name = subject.partition(":")
    if subject == "all":
        return "all classes"
    return name if found and kind in {"target", "class"} else subject.replace("_", " ")


def number_text(value: float | None, digits: int = 3) -> str:
    """``value`` with ``digits`` decimals; "not recorded" when it is missing, "undefined" when it is NaN."""
    if value is None:
        return NOT_RECORDED
    if math.isnan(value):
        return UNDEFINED
    return f"{value:z.{digits}f}"  # z: nothing is -0.000


def interval_text(value: float | None, low: float | None, high: float | None, digits: int = 3) -> str:
    """``0.812 [0.741, 0.880]``; without an interval the value alone."""
    text = number_text(value, digits)
    if value is None or low is None or high is None or not all(map(math.isfinite, (value, low, high))):
        return text
    return f"{text} [{low:z.{digits}f}, {high:z.{digits}f}]"


def bytes_text(size_bytes: float | None) -> str:
    """Bytes as kB, MB or GB (powers of ten, as disks and job limits are sold)."""
    if size_bytes is None or not math.isfinite(size_bytes):
        return NOT_RECORDED
    if size_bytes >= 1e9:
        return f"{size_bytes / 1e9:.2f} GB"
    if size_bytes >= 1e6:
        return f"{size_bytes / 1e6:.0f} MB"
    return f"{size_bytes / 1e3:.0f} kB" if size_bytes >= 1e4 else f"{size_bytes / 1e3:.1f} kB"


def megabytes_text(megabytes: float | None) -> str:
    """``629 MB``; the logs' megabytes are 1e6 bytes."""
    return bytes_text(None if megabytes is None else megabytes * 1e6)


def duration_text(seconds: float | None) -> str:
    """Seconds as ``42 s``, ``3 min 05 s`` or ``2 h 14 min``."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return NOT_RECORDED
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def time_text(utc: str | None) -> str:
    """``2025-03-04T10:15:00Z`` as ``2025-03-04 10:15 UTC``; anything else as it is."""
    if utc is None:
        return NOT_RECORDED
    try:
        moment = datetime.datetime.fromisoformat(utc)
    except ValueError:
        return utc
    return f"{moment:%Y-%m-%d %H:%M} UTC" if moment.utcoffset() == datetime.timedelta(0) else utc


def count_text(count: int, one: str, many: str | None = None) -> str:
    """``1 video``, ``2 videos``, ``12,000 videos``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def clean_text(text: object) -> str:
    """``text`` on one line and encodable: lone surrogates and control characters shown as escapes."""
    line = " ".join(str(text).split())
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return shown.encode("utf-8", "backslashreplace").decode()


def figure_text(text: object) -> str:
    """``text`` for titles, names and ticks of a plotly figure, which reads ``<b>``, ``<a>`` and entities there."""
    return escape(clean_text(text), quote=False)


_ESCAPED = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "[": "{[}"}
_LATEX = str.maketrans(_ESCAPED | {character: "\\" + character for character in "&%$#_{}"})


def latex_text(text: object) -> str:
    """``text`` for LaTeX, where ``&`` and the like are commands, and so is ``[`` at the beginning of a row."""
    return clean_text(text).translate(_LATEX)


def latex_table(caption: str, heads: Sequence[str], parts: Sequence[Sequence[Sequence[str]]]) -> str:
    """Return a LaTeX table for a paper that uses booktabs. All texts are LaTeX; ``parts`` are rows between rules."""
    body: list[str] = []
    for part in ([heads], *parts):
        body += [r"\midrule", *(" & ".join(row) + r" \\" for row in part)]
    begin = [r"% \usepackage{booktabs}", r"\begin{table}", r"\centering", rf"\caption{{{caption}}}"]
    columns = rf"\begin{{tabular}}{{{'l' * len(heads)}}}"
    return "\n".join([*begin, columns, r"\toprule", *body[1:], r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])
