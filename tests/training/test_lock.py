import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from papa.errors import RunError
from papa.training.lock import Lock


def test_one_process_at_a_time_and_no_files_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "run" / "deep" / ".lock"
    with Lock(path):
        assert json.loads(path.read_text()) == {"host": socket.gethostname(), "pid": os.getpid()}
        with (
            pytest.raises(RunError, match=f"deep is in use by process {os.getpid()} on {socket.gethostname()}"),
            Lock(path),
        ):
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
    code = f"import os, pathlib; from papa.training.lock import Lock; {held}; os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    assert json.loads(path.read_text())["pid"] != os.getpid()
    with Lock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_lock_of_another_host_says_how_to_override_it(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.write_text(json.dumps({"host": "elsewhere.example", "pid": 12}))
    with pytest.raises(RunError, match=r"in use by process 12 on elsewhere.example; .* remove .*\.lock"), Lock(path):
        pass
    assert json.loads(path.read_text())["pid"] == 12
    path.unlink()
    with Lock(path):
        pass


@pytest.mark.parametrize("content", [b"", b"{", b"[[[", b"[1]", b'{"host": 1, "pid": "x"}', bytes(5000), b"[" * 4096])
def test_an_invalid_holder_is_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".lock").write_bytes(content)
    with Lock(tmp_path / ".lock"):
        pass


def test_without_file_locks_the_process_number_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    path = tmp_path / ".lock"
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid()}))
    with pytest.raises(RunError, match=f"in use by process {os.getppid()}"), Lock(path):
        pass
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": 2**31 - 1}))
    with Lock(path):
        pass
