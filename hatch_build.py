"""Compiles `papa/kernels.c` when papa is built. Without a C compiler papa works too, with slower averaging."""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER, SOURCE, TARGET = "src/papa", "kernels.c", "libkernels.so"
FLAGS = "-O3 -ffp-contract=off -fno-trapping-math -fno-math-errno -fPIC -pthread -shared"
"""Products and sums are rounded one by one, so that results do not depend on the processor."""


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled functions to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile next to the source, for editable installations too."""
        if self.target_name != "wheel":
            return
        Path(self.root, FOLDER, TARGET).unlink(missing_ok=True)
        chosen = os.environ.get("CC")
        # The compiler that made Python may not be on this machine.
        compilers = [chosen] if chosen else [sysconfig.get_config_var("CC") or "cc", "cc", "gcc", "clang"]
        reasons = []
        for compiler in compilers:
            reason = self._compile(compiler)
            if reason is None:
                build_data["artifacts"].append(f"/{FOLDER}/{TARGET}")
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
                return
            reasons.append(f"{compiler}: {reason}")
        self.app.display_warning(
            f"{SOURCE} does not compile, so papa averages with PyTorch's operators. " + "; ".join(reasons)
        )

    def _compile(self, compiler: str) -> str | None:
        """Compile with one compiler; returns what is wrong, or None."""
        command = [*shlex.split(compiler), *shlex.split(FLAGS), "-o", TARGET, SOURCE]
        try:
            subprocess.run(command, cwd=Path(self.root, FOLDER), check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            return str(getattr(error, "stderr", "") or error)
        return None
