"""Compiles `papa/core/kernels.c` when papa is built. Without a C compiler papa works too, with slower averaging."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE, TARGET = "src/papa/core/kernels.c", "libkernels.so"
FLAGS = "-O3 -ffp-contract=off -fno-trapping-math -fno-math-errno -fPIC -pthread -shared"
"""Products and sums are rounded one by one, so that results do not depend on the processor."""


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled functions to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and put the library beside the source if that is what Python will import."""
        if self.target_name != "wheel":
            return
        source = Path(self.root, SOURCE)
        target = source.with_name(TARGET)
        library = self._compile(source, target.parent if version == "editable" else Path(self._folder.name))
        if library is None:
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        if version == "editable":
            os.replace(library, target)  # processes that use the old one keep it
        else:
            build_data["force_include"][str(library)] = f"papa/core/{TARGET}"

    @functools.cached_property
    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        """Exists until the wheel has been built."""
        return tempfile.TemporaryDirectory()

    def _compile(self, source: Path, folder: Path) -> Path | None:
        """Compile with the first compiler that can, into a new file of a folder."""
        chosen = os.environ.get("CC")
        # The compiler that made Python may not be on this machine.
        compilers = [chosen] if chosen else [sysconfig.get_config_var("CC") or "cc", "cc", "gcc", "clang"]
        library = folder / f".{TARGET}.{os.getpid()}"
        flags = [*shlex.split(FLAGS), f"-DPAPA_SOURCE={zlib.crc32(source.read_bytes())}u"]
        reasons = []
        for compiler in compilers:
            command = [*shlex.split(compiler), *flags, "-o", str(library), source.name]
            try:
                subprocess.run(command, cwd=source.parent, check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                library.unlink(missing_ok=True)
                reasons.append(f"{compiler}: {getattr(error, 'stderr', '') or error}")
            else:
                return library
        self.app.display_warning(
            f"{SOURCE} does not compile, so papa averages with PyTorch's operators. " + "; ".join(reasons)
        )
        return None
