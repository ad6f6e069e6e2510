"""Who may import whom: the order of rooms, read from the imports themselves."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import papa

ROOMS = [
    "errors",
    "streams",
    "process",
    "costs",
    "mixing",
    "layout",
    "binding",
    "product",
    "group",
    "population",
    "delayed",
    "rules",
    "health",
    "learning_rates",
    "averager",
    "selection",
    "soup",
    "ensemble",
    "inputs",
    "evaluation",
    "repair",
    "align",
    "similarity",
    "interpolation",
    "data",
    "checkpoint",
    "lock",
    "schedules",
    "training",
    "files",
    "lab",
    "cli",
]
"""From the foundation up: a module imports only from rooms before its own, or from its own."""

EXEMPT = ("__init__", "__main__", "_version")
"""The shop window, the back door and a number: no rooms."""

PACKAGE = Path(papa.__file__).parent


def modules_of(package: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name, `papa.lab.data.digits`."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = ("papa", *path.relative_to(package).with_suffix("").parts)
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


MODULES = modules_of(PACKAGE)


def room_of(module: str) -> str:
    """The room a module is in; for names that `papa` re-exports, the room they come from."""
    if module == "papa":
        return "__init__"
    name = module.split(".")[1]
    if f"papa.{name}" not in MODULES and hasattr(papa, name):
        return room_of(getattr(getattr(papa, name), "__module__", "papa._version"))
    return name


def imports_of(source: str, module: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """The line and the full dotted name of everything a module imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            here = module.split(".")
            above = here[: len(here) - node.level + is_package] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{origin}.{alias.name}"


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What a module imports from rooms that are not before its own."""
    own = room_of(module)
    if own not in ROOMS:
        return [f"{module} is in the room '{own}', which this test does not know: add it to ROOMS, where it belongs"]
    found = []
    for line, imported in imports_of(source, module, is_package=is_package):
        if imported.split(".")[0] != "papa":
            continue
        other = room_of(imported)
        if other == "_version" or other == own:
            continue
        if other == "__init__":
            found.append(f"{module}:{line} imports papa itself: import the room that is meant")
        elif other not in ROOMS:
            found.append(f"{module}:{line} imports {imported}, whose room '{other}' is unknown: add it to ROOMS")
        elif ROOMS.index(other) > ROOMS.index(own):
            found.append(f"{module}:{line} imports {imported}, but the room '{other}' comes after '{own}'")
    return found


def calls_print(source: str) -> list[int]:
    """The lines at which a module prints."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


def touches_distributed(source: str, module: str = "papa.example") -> list[int]:
    """The lines at which a module imports or names `torch.distributed`."""
    imported = [line for line, name in imports_of(source, module) if f"{name}.".startswith("torch.distributed.")]
    named = [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr == "distributed"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]
    return imported + named


INSIDE = [name for name in MODULES if room_of(name) not in EXEMPT]


@pytest.mark.parametrize("module", INSIDE)
def test_a_module_imports_only_from_rooms_before_its_own(module: str) -> None:
    path = MODULES[module]
    assert violations(path.read_text(), module, is_package=path.stem == "__init__") == []


@pytest.mark.parametrize("module", [name for name in INSIDE if room_of(name) != "cli"])
def test_only_the_command_line_prints(module: str) -> None:
    assert calls_print(MODULES[module].read_text()) == []


@pytest.mark.parametrize("module", [name for name in INSIDE if room_of(name) != "group"])
def test_only_group_knows_torch_distributed(module: str) -> None:
    assert touches_distributed(MODULES[module].read_text(), module) == []


def test_no_module_imports_itself_by_a_detour() -> None:
    graph = {}
    for module in INSIDE:
        path = MODULES[module]
        names = [name for _, name in imports_of(path.read_text(), module, is_package=path.stem == "__init__")]
        targets = {name if name in MODULES else name.rpartition(".")[0] for name in names}
        graph[module] = (targets & set(INSIDE)) - {module}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError and names the circle


def test_the_core_is_there() -> None:
    core = {"errors", "streams", "mixing", "flat", "group", "population", "rules", "averager", "soup", "repair"}
    assert core <= {room_of(module) for module in INSIDE}


@pytest.mark.parametrize(
    ("source", "module", "complaint"),
    [
        (
            "from papa.rules import Push",
            "papa.layout",
            "papa.layout:1 imports papa.rules.Push, but the room 'rules' comes",
        ),
        ("from papa import rules", "papa.layout", "the room 'rules' comes after 'layout'"),
        ("import papa.rules", "papa.layout", "the room 'rules' comes after 'layout'"),
        ("from . import rules", "papa.layout", "the room 'rules' comes after 'layout'"),
        ("from .rules import Push", "papa.layout", "the room 'rules' comes after 'layout'"),
        ("from ..cli import main", "papa.lab.data.digits", "the room 'cli' comes after 'data'"),
        ("def late():\n    from papa.soup import average_soup", "papa.rules", "papa.rules:2 imports papa.soup"),
        ("from papa import Push", "papa.layout", "the room 'rules' comes after 'layout'"),
        ("from papa.averager import Averager", "papa.rules", "the room 'averager' comes after 'rules'"),
        ("import papa", "papa.cli.run", "imports papa itself: import the room that is meant"),
        ("from papa.attic import box", "papa.cli.run", "whose room 'attic' is unknown: add it to ROOMS"),
        ("", "papa.attic", "papa.attic is in the room 'attic', which this test does not know: add it to ROOMS"),
    ],
)
def test_the_reader_of_imports_sees_what_is_forbidden(source: str, module: str, complaint: str) -> None:
    assert complaint in "\n".join(violations(source, module))


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import torch\nfrom collections import abc", "papa.errors"),
        ("from papa.population import Population", "papa.averager"),
        ("from papa import layout, mixing", "papa.soup"),
        ("from papa import Population", "papa.soup"),
        ("from papa.data import Arrays", "papa.lab.data.digits"),
        ("from papa import __version__", "papa.checkpoint"),
        ("from papa._version import __version__", "papa.checkpoint"),
    ],
)
def test_the_reader_of_imports_lets_pass_what_is_allowed(source: str, module: str) -> None:
    assert violations(source, module) == []


def test_the_readers_of_calls_see_what_they_look_for() -> None:
    assert calls_print("x = 1\nprint(x)\nblueprint(x)\nself.print(x)") == [2]
    for source in (
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "torch.distributed.barrier()",
    ):
        assert touches_distributed(source) == [1]
    assert touches_distributed("from torch import nn\nimport torch\nself.distributed") == []
