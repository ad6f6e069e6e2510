"""The package: two builds are equal, and the scan of its dependencies says what it did."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import papa
from papa.core import kernels

ROOT = Path(papa.__file__).parents[2]


def build(copy: Path, *, modified: int, umask: int, compiler: str | None = None, version: str = "standard") -> Path:
    """A wheel of a copy of the sources, whose files have another time and other permissions."""
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignore, copy_function=shutil.copyfile)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, copy / name)
    for file in copy.rglob("*"):
        os.utime(file, (modified, modified))
        file.chmod(0o777 & ~umask)
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    environment |= {} if compiler is None else {"CC": compiler}
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel"],
        cwd=copy,
        env=environment,
        check=True,
        capture_output=True,
    )
    (wheel,) = (copy / "dist").iterdir()
    return wheel


def test_two_builds_of_the_wheel_are_equal(tmp_path: Path) -> None:
    first = build(tmp_path / "a", modified=1_000_000_000, umask=0o022)
    second = build(tmp_path / "another", modified=1_700_000_000, umask=0o077)
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    names = names_in(first)
    assert ("papa/core/libkernels.so" in names) == (kernels.library() is not None)
    data = {"papa/lab/report/templates/run.html.j2", "papa/lab/recipes/tables/ablation1.csv"}
    assert {"papa/__init__.py", "papa/py.typed", *data} <= names


def test_an_editable_installation_has_the_library_beside_the_source(tmp_path: Path) -> None:
    folder = tmp_path / "src/papa/core"
    folder.mkdir(parents=True)
    shutil.copyfile(kernels.PATH.with_name("kernels.c"), folder / "kernels.c")
    (folder / "libkernels.so").write_bytes(b"an old one")
    made: dict[str, Any] = {"force_include": {}}
    hook = load("hatch_build.py").KernelsHook(str(tmp_path), {}, None, None, "", "wheel")
    hook.initialize("editable", made)
    is_compiled = made.get("pure_python") is False
    assert is_compiled == (kernels.library() is not None)
    assert ((folder / "libkernels.so").read_bytes() != b"an old one") == is_compiled
    assert {path.name for path in folder.iterdir()} == {"kernels.c", "libkernels.so"}
    assert not made["force_include"]


def test_without_a_c_compiler_the_wheel_is_pure_python(tmp_path: Path) -> None:
    wheel = build(tmp_path / "a", modified=1_000_000_000, umask=0o022, compiler="/no/such/compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "papa/core/libkernels.so" not in names_in(wheel)


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.startswith("papa/")}


def load(path: str) -> Any:
    """A script of the project as a module."""
    spec = importlib.util.spec_from_file_location("script", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PACKAGE = {"name": "a", "version": "1.0", "vulns": []}
VULNERABLE = {"name": "b", "version": "2.0", "vulns": [{"id": "CVE-1", "fix_versions": ["2.1"]}]}
UNKNOWN = {"name": "c", "skip_reason": "Dependency not found on PyPI and could not be audited: c (3.0)"}


@pytest.mark.parametrize(
    ("packages", "code", "message"),
    [
        ([PACKAGE, UNKNOWN], 0, "1 of 2 packages scanned, 0 known vulnerabilities"),
        ([PACKAGE, VULNERABLE], 1, "2 of 2 packages scanned, 1 known vulnerabilities\n  b 2.0: CVE-1, fixed in 2.1"),
        ([UNKNOWN], 0, "SKIPPED, nothing was scanned: the database cannot be reached; it knew none of 1 packages"),
        (None, 0, "SKIPPED, nothing was scanned: the database of vulnerabilities cannot be reached (no route)"),
    ],
)
def test_the_scan_of_dependencies_says_what_it_did(packages: Any, code: int, message: str) -> None:
    audit = load(".ci/audit.py")
    output = "" if packages is None else json.dumps({"dependencies": packages})
    assert audit.verdict(output, "first\nno route\n") == (code, message)
