"""How often the system killed for memory in this process's control group and the groups it lies in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class OomKills:
    """Kills for memory: ``own`` in this process's group or below, ``around`` in a group that contains it.

    A kill in ``own`` may have met any process of the group, a sibling too; one in ``around`` alone met another group,
    whose memory counts against the same limit. None: no counter can be read here.
    """

    own: int | None
    around: int | None

    def since(self, earlier: OomKills) -> OomKills:
        """What was added since ``earlier``."""
        return OomKills(_added(self.own, earlier.own), _added(self.around, earlier.around))


def oom_kills(root: Path = Path("/")) -> OomKills:
    """The counters as they are now.

    Args:
        root: the folder in which ``proc/self/cgroup`` and ``sys/fs/cgroup`` lie.
    """
    own = around = None
    for base, group, name in _memory_groups(root):
        folders = [base.joinpath(*group[:depth]) for depth in range(len(group), -1, -1)]
        counts = [count for folder in folders if (count := _count(folder / name)) is not None]
        if counts and _count(folders[0] / name) is not None:
            own = counts.pop(0)
        # Version 2 counts in every group above as well, version 1 in the victim's alone: the largest is the outermost.
        around = max(counts, default=around)
    return OomKills(own, around)


def _memory_groups(root: Path) -> Iterator[tuple[Path, tuple[str, ...], str]]:
    """The mount, the group's path below it and the counter's file, of version 2 and of version 1's memory groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    base = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, group = line.split(":", 2)
        parts = tuple(part for part in group.split("/") if part not in ("", ".."))
        if not controllers and (base / "cgroup.controllers").exists():
            yield base, parts, "memory.events"
        elif "memory" in controllers.split(","):
            yield base / "memory", parts, "memory.oom_control"


def _count(path: Path) -> int | None:
    try:
        match = re.search(r"^oom_kill (\d+)", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def _added(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else max(0, now - before)
