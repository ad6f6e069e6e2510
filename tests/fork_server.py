"""Forks processes for tests from a server that has imported what they need, which takes seconds in a new process.

A process that has used autograd, such as that of the tests, cannot be forked; the server has only imported modules.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path

import pytest

import papa

FOLDERS = (Path(papa.__file__).parents[1], Path(__file__).parent)
MODULES = ["distributed_jobs", "memory_jobs", "mesh_jobs", "papa.cli.run", "papa.cli.compare", "torch._dynamo"]
MODULES += ["torch.export._trace", "sklearn.datasets", "matplotlib.backends.backend_svg", "matplotlib.figure", "jinja2"]
MODULES += ["plot_forms", "frozen"]
_lock = threading.Lock()


def context() -> BaseContext:
    """The context of processes that are forked from the server."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(MODULES)
    with _lock, pytest.MonkeyPatch.context() as patch:
        # A server does not get `sys.path`, and ignores modules that it does not find.
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, FOLDERS)))
        forkserver.ensure_running()
    return found
