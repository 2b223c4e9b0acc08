import gc
import weakref
from collections.abc import Iterator

import pytest

from fvc_lib.services.memory import frozen_garbage


class _Ring:
    """Held only by itself, as a cycle of tensors and closures would be."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    """As outside of the tests, which have frozen all that they imported."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_was_there_before_is_out_of_the_collectors_way_and_only_rubbish_is_collected():
    """All in one: each beginning and end looks at everything that all tests have imported."""
    before, old = gc.get_freeze_count(), weakref.ref(_Ring())
    with frozen_garbage():
        assert old() is None
        assert gc.get_freeze_count() > before + 1000
        new = weakref.ref(_Ring())
        gc.collect()
        assert new() is None
        frozen = gc.get_freeze_count()
        with frozen_garbage():  # inside another it does nothing
            assert gc.get_freeze_count() == frozen
        assert gc.get_freeze_count() == frozen
    assert gc.get_freeze_count() == before
