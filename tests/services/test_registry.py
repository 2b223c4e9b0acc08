"""Registries find items in the files of a folder, and check names without imports."""

import sys
from dataclasses import dataclass

import pytest

from fvc_lib.services.errors import UsageError
from fvc_lib.services.registry import Registry

SHAPES: Registry[object] = Registry("shape")


@dataclass(frozen=True)
class Named:
    name: str


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Yield a package of plug-ins, whose files register at ``registered_shapes.SHAPES``."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "registered_shapes.py").write_text(
        "from fvc_lib.services.registry import Registry\nSHAPES = Registry('shape', 'plugged_shapes')\n"
    )
    package = tmp_path / "plugged_shapes" / "flat"
    package.mkdir(parents=True)
    for each in (package, package.parent):
        (each / "__init__.py").write_text("")
    yield package
    for name in [n for n in sys.modules if n.startswith(("plugged_shapes", "registered_shapes"))]:
        del sys.modules[name]


def write(path, *lines):
    path.write_text("\n".join(["from registered_shapes import SHAPES", *lines, ""]))


def shapes():
    from registered_shapes import SHAPES

    return SHAPES


def test_an_item_is_registered_by_decorator_by_call_or_by_its_own_name_and_only_once(tmp_path):
    registry: Registry[object] = Registry("shape")

    @registry.register
    class Square:
        name = "square"

    disc = registry.register(object(), "disc")
    star = registry.register(Named("star"))
    assert registry.get("square") is Square
    assert registry.get("star") is star
    assert registry.items() == [("square", Square), ("disc", disc), ("star", star)]
    for name in ("first.py", "second.py"):
        code = compile("registry.register(1, 'oval')", str(tmp_path / name), "exec")
        if name == "first.py":
            exec(code, {"registry": registry})
            exec(code, {"registry": registry})  # the same line again is a reload
    with pytest.raises(UsageError, match=r"'oval' is registered twice: in .*first\.py, line 1, and in .*second\.py"):
        exec(code, {"registry": registry})
    with pytest.raises(UsageError, match="a notebook's cell cannot register it"):
        exec(compile("registry.register(1, 'cell')", "/tmp/ipykernel_1/2.py", "exec"), {"registry": registry})
    assert registry.names() == ["square", "disc", "star", "oval"]


def test_a_broken_file_of_the_item_asked_for_is_named_and_no_other_is_imported(folder):
    write(folder / "broken.py", "raise OSError('no ruler')", 'SHAPES.register(1, "disc")')
    write(folder / "oval.py", "import no_such_package", 'SHAPES.register(1, "oval")')
    write(folder / "square.py", 'SHAPES.register(4, "square")')
    assert shapes().get("square") == 4
    assert shapes().broken == {}
    with pytest.raises(UsageError, match=r"'oval': unknown.*Not loaded: .*flat.oval \(ModuleNotFound"):
        shapes().get("oval")


def test_a_name_is_checked_without_importing_what_has_it(folder):
    square = 'SHAPES.register(type("Square", (), dict(name="square")))'
    write(folder / "square.py", square)
    write(folder / "polygon.py", 'SHAPES.register(5, "polygon:NAME")')

    assert [shapes().check(name) for name in ("square", "polygon:7")] == ["square", "polygon:7"]
    assert shapes().declared_in("polygon:8") == ["plugged_shapes.flat.polygon"]
    assert "plugged_shapes.flat.square" not in sys.modules
    with pytest.raises(UsageError, match="Did you mean 'square'"):
        shapes().check("squarre")
    assert shapes().get("polygon:7") == 5
    with pytest.raises(UsageError, match="Known: polygon:NAME, square"):
        shapes().check("polygon")
