"""How values given as text become a field's own type."""

from __future__ import annotations

from typing import Any


def split_names(value: Any) -> Any:
    """``-p augmentations flip,noise`` means the same as a YAML list, also as one given as text: ``[flip, noise]``."""
    if isinstance(value, str):
        listed = value.strip()
        if listed.startswith("[") and listed.endswith("]"):
            listed = listed[1:-1]
        return tuple(name.strip(" '\"") for name in listed.split(",") if name.strip(" '\""))
    return tuple(value) if isinstance(value, list) else value


def split_numbers(value: Any) -> Any:
    """``-p recall_at 1,5,10`` and a YAML list mean the same."""
    names = split_names(value)
    return tuple(int(name) if isinstance(name, str) and name.isdecimal() else name for name in names)
