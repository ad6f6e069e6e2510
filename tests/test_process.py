"""Threads and memory of a process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PAGES_FAULTED = """
import resource
import torch
from papa.process import configure_process

configure_process()
assert torch.get_num_threads() == 1

def use_memory():
    tensors = [torch.ones(2**22) for _ in range(8)]  # 16 MB each, all freed together

def pages_faulted():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use_memory()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

# The minimum, since the system may take some pages away in between.
print(min([pages_faulted() for _ in range(8)]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can keep memory")
def test_freed_memory_is_reused() -> None:
    done = subprocess.run([sys.executable, "-c", PAGES_FAULTED], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100, "128 MB are 32,768 pages, which would all be requested again"
