import subprocess
import sys
from pathlib import Path

import pytest

from papa.errors import RunError
from papa.storage.lock import Lock


def test_one_process_at_a_time_and_no_files_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "run" / "deep" / ".lock"
    assert not Lock(path).is_held
    with Lock(path):
        assert Lock(path).is_held
        with pytest.raises(RunError, match="deep is in use by another process: wait until it ends"), Lock(path):
            pass
        assert path.exists()
    assert list(tmp_path.iterdir()) == []


def test_directories_stay_if_they_hold_files(tmp_path: Path) -> None:
    with Lock(tmp_path / "run" / ".lock"):
        (tmp_path / "run" / "config.json").write_text("{}")
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["config.json"]


def test_the_lock_of_a_process_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    held = f"Lock(pathlib.Path({str(path)!r})).__enter__()"
    code = f"import os, pathlib; from papa.storage.lock import Lock; {held}; os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    assert path.exists()
    assert not Lock(path).is_held
    with Lock(path):
        assert Lock(path).is_held


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot make the directory .*file"), Lock(tmp_path / "file" / "run" / ".lock"):
        pass
