"""One member per process, connected by papa alone: no framework sees the group."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import papa
from papa.cli import main
from papa.distributed.each import environment_of, run_each
from papa.distributed.members import connect_members, group_of_environment, member_of_environment
from papa.errors import ConfigError

SCRIPT = Path(__file__).parents[1] / "member_script.py"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(papa.__file__).parents[1]))


def test_members_are_averaged_restarted_and_leave_the_soup(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "7")
    soup = tmp_path / "out" / "soup.safetensors"
    command = [sys.executable, str(SCRIPT), "{member}", str(tmp_path), "fail"]
    assert main(["each", "--members", "2", "--out", str(soup), "--restarts", "1", "--", *command]) == 0
    shown = capfd.readouterr()
    assert "papa: member 1 failed with exit code 3: starting all again" in shown.err
    assert "[0] 5 averagings, 2 members" in shown.out
    assert "[1] 5 averagings, 2 members" in shown.out
    assert f"one network: {soup}" in shown.out
    record = json.loads(Path(f"{soup}.json").read_text())
    assert [file["path"] for file in record["files"]] == ["member 0", "member 1"], "no temporary paths"
    members = [torch.load(tmp_path / f"{member}.pt", weights_only=True) for member in range(2)]
    found, expected = load_file(soup), papa.average_soup(members)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(members[0][name], members[1][name]) for name in members[0])


def test_a_member_that_fails_ends_the_others(tmp_path: Path) -> None:
    code = "import sys, time; print('hello'); sys.exit(4) if sys.argv[1] == '1' else time.sleep(1000)"
    lines: list[tuple[int, str]] = []
    events: list[str] = []
    found = run_each(
        [sys.executable, "-u", "-c", code, "{member}"],
        3,
        on_line=lambda member, line: lines.append((member, line)),
        on_event=events.append,
    )
    assert found == 4
    assert events == ["member 1 failed with exit code 4: the others were ended"]
    assert (1, "hello") in lines


def test_a_soup_that_members_wrote_themselves_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os; open(os.environ['PAPA_WEIGHTS'] + '/soup', 'w').write('out/soup')"
    assert main(["each", "--members", "2", "--", sys.executable, "-c", code]) == 0
    assert "one network: out/soup" in capfd.readouterr().out


def test_a_rank_of_a_member_is_connected_before_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PAPA_MEMBER": "0", "PAPA_MEMBERS": "2", "PAPA_STORE": "127.0.0.1:1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"one of 4 that train one member(.*)init_process_group\(\) before it joins"):
        group_of_environment()


def test_a_process_looks_like_a_single_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = environment_of(1, 2)
    assert "RANK" not in found
    assert (found["PAPA_MEMBER"], found["PAPA_MEMBERS"], found["CUDA_VISIBLE_DEVICES"]) == ("1", "2", "5")
    assert int(found["OMP_NUM_THREADS"]) == max(1, (os.cpu_count() or 1) // 2)
    assert environment_of(2, 4)["CUDA_VISIBLE_DEVICES"] == "6"
    assert environment_of(3, 4)["CUDA_VISIBLE_DEVICES"] == "4"


def test_wrong_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["each", "--members", "2"]) == 2
    assert "there is no command: write it after --" in capsys.readouterr().err
    assert main(["each", "--members", "2", "--", "no-such-program"]) == 2
    assert "'no-such-program' cannot be started: No such file or directory" in capsys.readouterr().err
    assert main(["each", "--members", "2", "--out", str(tmp_path / "none"), "--", "true"]) == 2
    assert "members did not call papa.join, so there is no soup" in capsys.readouterr().err
    soup = tmp_path / "soup.safetensors"
    soup.write_text("precious")
    assert main(["each", "--members", "2", "--out", str(soup), "--", "true"]) == 2
    assert f"{soup} exists: choose another --out, or add --overwrite to replace it" in capsys.readouterr().err
    assert soup.read_text() == "precious"
    assert main(["each", "--members", "0", "--", "true"]) == 2
    assert "got 0 members and 0 restarts, expected at least 1 and 0" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="PAPA_MEMBER is '3' and PAPA_MEMBERS '3', expected an index"):
        member_of_environment({"PAPA_MEMBER": "3", "PAPA_MEMBERS": "3"})
    with pytest.raises(ConfigError, match=r"address is 'here', expected host and port"):
        connect_members(member=0, num_members=2, address="here")
