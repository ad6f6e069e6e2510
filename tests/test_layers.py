"""The order of folders: each imports only from those before it, and `core` needs nothing but torch and numpy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import papa

PACKAGE = Path(papa.__file__).parent
BASE = ("_version", "member", "errors", "streams", "process", "packages")
LAYERS = (
    *("storage", "evaluation", "core", "distributed", "couplings", "repair", "analysis", "verdict", "files", "align"),
    *("training", "attach", "integrations", "lab", "cli"),
)
"""From the foundation up."""


def imports_of(path: Path) -> Iterator[str]:
    """The full names of everything that a module imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_from_those_before_it(layer: str) -> None:
    allowed = {*BASE, *LAYERS[: LAYERS.index(layer) + 1]}
    paths = [*PACKAGE.glob(f"{layer}.py"), *PACKAGE.glob(f"{layer}/**/*.py")]
    found = {(path.name, name) for path in paths for name in imports_of(path) if name.startswith("papa.")}
    assert paths
    assert {(path, name) for path, name in found if name.split(".")[1] not in allowed} == set()


def test_core_imports_torch_and_numpy_only() -> None:
    roots = {name.split(".")[0] for path in PACKAGE.glob("core/*.py") for name in imports_of(path)}
    assert roots - sys.stdlib_module_names <= {"papa", "torch", "numpy"}


def test_only_the_command_line_prints() -> None:
    for path in PACKAGE.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        prints = any(isinstance(call, ast.Name) and call.id == "print" for call in calls)
        assert not prints or "cli" in path.parts, path


def test_the_library_imports_neither_lab_nor_heavy_packages() -> None:
    code = "import papa; [getattr(papa, name) for name in papa.__all__]; import sys; print(*sys.modules)"
    modules = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split())
    assert not modules & {"papa.lab", "papa.cli", "timm", "torchvision", "matplotlib", "transformers", "lightning"}
