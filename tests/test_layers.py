"""The library never imports the lab or the command line, and modules import only from modules before them."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import papa
from papa.packages import EXTRAS

LIBRARY = [
    *(
        "lazy",
        "errors",
        "packages",
        "half_life",
        "streams",
        "process",
        "storage",
        "lock",
        "mixing",
        "layout",
        "binding",
        "scratch",
        "columns",
        "kernels",
        "product",
        "row_measures",
        "group",
        "member_rows",
        "population",
        "measuring",
        "masks",
    ),
    *("delayed", "rules", "extra_rows", "health", "learning_rates", "inputs", "observation", "optimizer_state"),
    *("diagnostics", "averaging_report", "averager_state", "averager", "asynchronous"),
    *(
        "soup",
        "saved_soups",
        "joining",
        "data_loaders",
        "ensemble",
        "evaluation",
        "advice",
        "chosen_soups",
        "task",
        "repair",
        "align",
        "similarity",
        "interpolation",
    ),
    *("data", "schedules", "checkpoint", "training", "distillation", "files"),
    "integrations",
]
"""The modules of `papa`, from the foundation up: each imports only from modules before it, or from its own package."""

LAB = [
    *("signals", "costs", "config_checks", "config", "data", "models", "augment", "tasks", "result", "runs", "report"),
    *("listing", "probes", "analysis", "selection", "outcome"),
    *("domains", "recipes", "sampling", "scoring", "recorder", "launch", "launch_many", "reproduce"),
]
"""The modules of `papa.lab`, in the same order; each may import the whole library."""

LIBRARY_DEPENDENCIES = {"torch", "numpy", "safetensors", "filelock"}
OPTIONAL = {"scipy": "papa.align"}
"""What only one package of the library needs: imported inside of functions."""
INTEGRATIONS = "papa.integrations."
"""Modules that may import optional packages at their top: each is imported only by those who use its framework."""

HEAVY = (
    *("tyro", "rich", "sklearn", "torchvision", "timm", "matplotlib", "jinja2", "scipy", "tensorboard"),
    *("tokenizers", "transformers"),
    *("accelerate", "lightning", "mlflow", "trackio", "wandb"),
)

PACKAGE = Path(papa.__file__).parent


def find_modules(package: Path) -> dict[str, Path]:
    """Every module by its dotted name."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = ("papa", *path.relative_to(package).with_suffix("").parts)
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


MODULES = find_modules(PACKAGE)
CHECKED = [name for name in MODULES if name not in ("papa", "papa.__main__", "papa._version", "papa.lab")]


def imports_of(source: str, module: str, *, is_package: bool = False) -> Iterator[tuple[int, str, bool]]:
    """Line, full name and whether it stands in a function, of everything a module imports at run time."""
    tree = ast.parse(source)
    for_types = {id(inner) for node in ast.walk(tree) if _is_type_checking(node) for inner in ast.walk(node)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(inner) for node in functions for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) in inside
        elif isinstance(node, ast.ImportFrom):
            here = module.split(".")
            above = here[: len(here) - node.level + is_package] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{origin}.{alias.name}", id(node) in inside


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def place_of(module: str) -> tuple[int, str, int]:
    """A module's layer (0 library, 1 lab, 2 command line), its name there, and its position in the layer."""
    parts = module.split(".")[1:]
    if parts[:1] == ["cli"]:
        return 2, "cli", 0
    layer, names, name = (1, LAB, parts[1]) if parts[:1] == ["lab"] else (0, LIBRARY, parts[0])
    return layer, name, names.index(name) if name in names else -1


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What a module imports against the order of layers and modules."""
    layer, name, position = place_of(module)
    if position < 0:
        return [f"{module} is not in the lists of this test: add it where it belongs"]
    found = []
    for line, imported, is_inside in imports_of(source, module, is_package=is_package):
        root = imported.split(".")[0]
        if root != "papa":
            if layer == 0 and not _is_allowed(root, module, is_inside):
                found.append(f"{module}:{line} imports {root}, which the library does not depend on")
            continue
        if imported.startswith("papa._version"):
            continue
        if imported in ("papa", "papa.lab") or (imported.count(".") == 1 and imported not in MODULES):
            found.append(f"{module}:{line} imports {imported}: import the module that is meant")
            continue
        other_layer, other, other_position = place_of(imported)
        if other_position < 0:
            found.append(f"{module}:{line} imports {imported}, which is not in the lists of this test")
        elif other_layer > layer:
            found.append(f"{module}:{line} imports {imported}, which is of a higher layer")
        elif other_layer == layer and other != name and other_position > position:
            found.append(f"{module}:{line} imports {imported}, but '{other}' comes after '{name}'")
    return found


def _is_allowed(root: str, module: str, is_inside: bool) -> bool:
    if root in sys.stdlib_module_names or root in LIBRARY_DEPENDENCIES:
        return True
    if module.startswith(INTEGRATIONS):
        return root in EXTRAS
    return is_inside and module.startswith(OPTIONAL.get(root, "none"))


@pytest.mark.parametrize("module", CHECKED)
def test_a_module_imports_only_what_comes_before_it(module: str) -> None:
    path = MODULES[module]
    assert violations(path.read_text(), module, is_package=path.stem == "__init__") == []


def test_there_is_no_cycle_of_imports() -> None:
    graph = {}
    for module in CHECKED:
        path = MODULES[module]
        names = [name for _, name, _ in imports_of(path.read_text(), module, is_package=path.stem == "__init__")]
        targets = {name if name in MODULES else name.rpartition(".")[0] for name in names}
        graph[module] = (targets & set(CHECKED)) - {module}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize(
    ("source", "module", "complaint"),
    [
        (
            "from papa.rules import Push",
            "papa.layout",
            "papa.layout:1 imports papa.rules.Push, but 'rules' comes after",
        ),
        ("import papa.rules", "papa.layout", "'rules' comes after 'layout'"),
        ("from . import rules", "papa.layout", "'rules' comes after 'layout'"),
        ("from ..cli import main", "papa.lab.config", "of a higher layer"),
        ("from papa.lab.config import Config", "papa.training.loop", "of a higher layer"),
        ("def late():\n    from papa.soup import average_soup", "papa.rules", "papa.rules:2 imports papa.soup"),
        ("from papa import Push", "papa.layout", "import the module that is meant"),
        ("import papa", "papa.cli.run", "import the module that is meant"),
        ("import rich", "papa.rules", "imports rich, which the library does not depend on"),
        ("import scipy", "papa.align.search", "imports scipy"),
        ("import lightning", "papa.training.loop", "imports lightning"),
        ("import requests", "papa.integrations.lightning", "imports requests"),
        ("def late():\n    import scipy", "papa.rules", "imports scipy"),
        ("", "papa.attic", "papa.attic is not in the lists of this test"),
    ],
)
def test_forbidden_imports_are_found(source: str, module: str, complaint: str) -> None:
    assert complaint in "\n".join(violations(source, module))


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import torch\nfrom collections import abc", "papa.errors"),
        ("from papa.population import Population", "papa.averager"),
        ("from papa import layout, mixing", "papa.soup"),
        ("from papa.data import Arrays", "papa.lab.data.digits"),
        ("if TYPE_CHECKING:\n    from papa.training.loop import Training", "papa.rules"),
        ("def late():\n    import scipy", "papa.align.search"),
        ("import sklearn", "papa.lab.data.digits"),
        ("import lightning.pytorch", "papa.integrations.lightning"),
        ("from papa._version import __version__", "papa.checkpoint.store"),
    ],
)
def test_allowed_imports_pass(source: str, module: str) -> None:
    assert violations(source, module) == []


def calls_print(source: str) -> list[int]:
    """The lines at which a module prints."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


@pytest.mark.parametrize("module", [name for name in CHECKED if not name.startswith("papa.cli")])
def test_only_the_command_line_prints(module: str) -> None:
    assert calls_print(MODULES[module].read_text()) == []


def uses_distributed(source: str, module: str = "papa.example") -> list[int]:
    """The lines at which a module imports or names `torch.distributed`."""
    imported = [line for line, name, _ in imports_of(source, module) if f"{name}.".startswith("torch.distributed.")]
    named = [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr == "distributed"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]
    return imported + named


@pytest.mark.parametrize("module", [name for name in CHECKED if not name.startswith("papa.group")])
def test_only_the_group_uses_torch_distributed(module: str) -> None:
    assert uses_distributed(MODULES[module].read_text(), module) == []


def test_the_checks_of_calls_can_fail() -> None:
    assert calls_print("x = 1\nprint(x)\nblueprint(x)\nself.print(x)") == [2]
    for source in (
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "torch.distributed.barrier()",
    ):
        assert uses_distributed(source) == [1]
    assert uses_distributed("from torch import nn\nimport torch\nself.distributed") == []


STATEMENTS = [
    "import papa",
    "from papa import Averager, Ensemble, Population, Push, average_soup, evaluate, greedy_soup",
    "from papa import train, align_, soup_files, repair_, interpolate",
    "import papa.training, papa.files",
]


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """The modules that are there, on top of torch, after each of the statements in a new process."""
    code = "import sys, torch; before = set(sys.modules)\n"
    code += "\n".join(f"{statement}; print(*set(sys.modules) - before)" for statement in STATEMENTS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {statement: set(line.split()) for statement, line in zip(STATEMENTS, done.stdout.splitlines(), strict=True)}


@pytest.mark.parametrize("statement", STATEMENTS)
def test_the_library_imports_no_heavy_package(imported: dict[str, set[str]], statement: str) -> None:
    found = imported[statement]
    assert {name.split(".")[0] for name in found} & set(HEAVY) == set()
    assert not any(name.startswith(("papa.lab", "papa.cli")) for name in found)


def test_a_loop_of_your_own_loads_less_than_8000_lines(imported: dict[str, set[str]]) -> None:
    ours = [MODULES[name] for name in imported[STATEMENTS[1]] if name in MODULES]
    assert 20 < len(ours) < 60
    assert sum(len(path.read_text().splitlines()) for path in ours) < 8000
