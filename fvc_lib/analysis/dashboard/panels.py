"""Panels of the dashboard, which show the runs and metrics that the user selected (``queries.Selection``).

A panel is one figure, table or text. The module in ``analysis/figures`` that draws a panel also registers it, with
``@PANELS.register_panel``. So a new panel needs no change in any other file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from fvc_lib.analysis.pages.display import figure_bundle
from fvc_lib.analysis.read.queries import SQL_TABLES, Selection, task_of
from fvc_lib.analysis.wording import clean_text
from fvc_lib.services.errors import FvcError
from fvc_lib.services.registry import Registry

MOST_METRICS = 3  # the most metrics whose learning curves are drawn
QUICK_REPLICATES = 500  # half-samples behind a band; few, because a redraw must feel immediate
NOTHING = "\N{ZERO WIDTH SPACE}"  # an empty output would be a gap in the numbering of displays

Bundle = dict[str, Any]
Shown = Any  # a figure, a table or a text; plotly has no type hints


# --- Panels


@dataclass(frozen=True)
class Panel:
    """One figure, table or text of the dashboard.

    Attributes:
        name: unique name.
        at: position. Panels are shown in ascending order.
        draw: function that takes a ``Selection`` (the user's choice) and returns a figure, table or text.
        follows: fields of ``Selection`` whose change redraws the panel. The panel is also redrawn whenever the reader
            chooses another run to show in detail.
        tasks: the panel is shown if the run in the detailed view has one of these tasks, such as ``image``. Empty: it
            is always shown.
    """

    name: str
    at: float
    draw: Callable[[Selection], Shown]
    follows: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()

    def bundle(self, selection: Selection, *, with_still: bool = False) -> Bundle:
        """Return the content of the panel for ``selection``, as a dict from mimetype to content for IPython.

        ``with_still`` says whether a figure also gets a still picture (PNG), which takes time. If drawing fails, the
        content is a sentence that says so. The content is invisible in two cases: the panel is a figure without data,
        or it is not meant for the task of the run that is shown in detail.

        Raises:
            FvcError: a file that the panel reads is damaged or missing.
        """
        is_meant = not self.tasks or task_of(selection.detailed) in self.tasks
        try:
            shown = self.draw(selection) if is_meant else NOTHING
        except FvcError:
            raise  # a damaged file is refused by its name
        except Exception as error:  # noqa: BLE001 - one panel must not end the others, nor the stage of a run
            shown = clean_text(f"{self.name} cannot be shown: {type(error).__name__}: {error}")
        if isinstance(shown, go.Figure):
            if shown.data:
                return figure_bundle(shown, with_still=with_still)
            shown = NOTHING
        if shown == NOTHING:  # text alone would take a line
            return {"text/plain": shown, "text/html": '<div style="display:none"></div>'}
        return {"text/plain": shown} if isinstance(shown, str) else dict(shown._repr_mimebundle_())


class PanelRegistry(Registry[Panel]):
    """The registry of all panels of the dashboard, by name."""

    def register_panel(self, name: str, *, at: float, **more: Any) -> Callable[..., Callable[[Selection], Shown]]:
        """Return a decorator for a function that takes a ``Selection`` and returns the content of a panel.

        The decorator registers the function as a panel and returns it unchanged.

        Args:
            name: unique name of the panel.
            at: position. Panels are shown in ascending order.
            more: further fields of ``Panel``, such as ``follows``.
        """

        def registered(draw: Callable[[Selection], Shown]) -> Callable[[Selection], Shown]:
            self.register(Panel(name, at, draw, **more))
            return draw

        return registered


PANELS = PanelRegistry("panel", "fvc_lib.analysis.figures")


def panels() -> tuple[Panel, ...]:
    """Return all registered panels, ordered by their position ``at``."""
    return tuple(sorted((panel for _, panel in PANELS.items()), key=lambda panel: panel.at))


@PANELS.register_panel("notes", at=90)
def notes(selection: Selection) -> str:
    """Return text that lists panels that failed to load, and files and log lines that could not be read.

    Only files of the run that is shown in detail are listed.
    """
    missing = [f"Panels of {module} are missing: {reason}" for module, reason in PANELS.broken.items()]
    unread = [note for read in SQL_TABLES.values() for note in read([selection.detailed]).notes]
    return "\n".join(dict.fromkeys(missing + unread)) or "All lines of the run in detail could be read."
