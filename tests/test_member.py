"""`torchrun -m papa.member`: an unchanged script trains one member in each process."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import papa
from papa.distributed.members import connect_members, group_of_environment, member_of_environment
from papa.errors import ConfigError
from papa.member import environment_of, parse

SCRIPT = Path(__file__).parent / "member_script.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.1")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
    "PYTHONPATH": str(Path(papa.__file__).parents[1]),
    "OMP_NUM_THREADS": "1",
}


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, cwd=cwd, check=False)


def check_soup(soup: Path, directory: Path) -> None:
    """The soup is the mean of both members, which differ."""
    members = [torch.load(directory / f"{member}.pt", weights_only=True) for member in range(2)]
    found = load_file(soup)
    assert found.keys() == members[0].keys()
    for name, tensor in found.items():
        expected = sum(state[name].double() for state in members) / 2
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(members[0][name], members[1][name]) for name in found)


def test_a_killed_member_is_restarted_with_all_and_the_last_one_leaves_the_soup(tmp_path: Path) -> None:
    soup = tmp_path / "out" / "soup.safetensors"
    options = ("--max-restarts", "1", "-m", "papa.member", "--soup", soup, SCRIPT, "{member}", tmp_path)
    done = run(*TORCHRUN, *options, "killed")
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    assert "[0] 5 averagings, 2 members" in done.stdout
    assert "[1] 5 averagings, 2 members" in done.stdout
    check_soup(soup, tmp_path)
    record = json.loads(Path(f"{soup}.json").read_text())
    assert [file["path"] for file in record["files"]] == ["member 0", "member 1"], "no temporary paths"
    assert sorted(path.name for path in soup.parent.iterdir()) == ["soup.safetensors", "soup.safetensors.json"]
    done = run(*TORCHRUN, *options)
    assert done.returncode != 0
    assert f"{soup} exists: choose another --soup, or add --overwrite to replace it" in done.stderr


def test_a_failed_training_leaves_no_soup(tmp_path: Path) -> None:
    soup = tmp_path / "soup.safetensors"
    done = run(*TORCHRUN, "-m", "papa.member", "--soup", soup, SCRIPT, "{member}", tmp_path, "fails")
    assert "exitcode  : 3" in done.stderr
    assert not soup.exists()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def test_each_member_may_have_a_launcher_of_its_own(tmp_path: Path) -> None:
    soup = tmp_path / "soup.safetensors"
    own = [sys.executable, "-m", "papa.member", "--members", "2", "--store", f"127.0.0.1:{free_port()}", "--member"]
    script = [str(SCRIPT), "{member}", str(tmp_path)]
    members = [
        subprocess.Popen([*own, str(member), "--soup", str(soup), *script], env=ENVIRONMENT) for member in range(2)
    ]
    assert [member.wait() for member in members] == [0, 0]
    check_soup(soup, tmp_path)


def test_the_script_runs_alone_too(tmp_path: Path) -> None:
    done = run(SCRIPT, "0", tmp_path)
    assert (done.returncode, done.stdout) == (0, "[0] 0 averagings, 1 members\n"), done.stderr
    assert "papa.join does nothing: this process is not one of several members" in done.stderr


def is_there(process: int) -> bool:
    """Whether a process runs, and is not merely waiting for its parent."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent ended")
def test_members_end_when_torchrun_is_killed(tmp_path: Path) -> None:
    command = [*TORCHRUN, "-m", "papa.member", str(SCRIPT), "{member}", str(tmp_path), "waits"]
    agent = subprocess.Popen([sys.executable, *command], env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    files = [tmp_path / f"start-{member}" for member in range(2)]
    eventually(lambda: all(file.exists() and file.read_text() for file in files))
    members = [int(file.read_text()) for file in files]
    assert all(map(is_there, members))
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    eventually(lambda: not any(map(is_there, members)))


def test_a_module_is_run_as_python_does_and_torch_is_its_own_to_import(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "beside.py").touch()
    text = "import sys\nfrom package import beside\nprint(__name__, sys.argv[1:], 'torch' in sys.modules)\n"
    (tmp_path / "package" / "train.py").write_text(text)
    options = ("--member", "1", "--members", "2", "--asynchronous", tmp_path / "published")
    done = run("-m", "papa.member", *options, "-m", "package.train", "--seed={member}", "{members}", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "__main__ ['--seed=1', '2'] False\n"), done.stderr
    done = run("-m", "papa.member", *options, "--soup", "soup.safetensors", "-m", "package.train", cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        "papa.member: the script did not call papa.join, so there is no soup",
    )


STARTED = {
    **{"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
    **{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True", "HOME": "/home"},
}
"""What torchrun sets."""


def environment(*arguments: str, num_gpus: int = 0, **variables: str) -> dict[str, str]:
    return environment_of(parse([*arguments, "train.py"]), {**STARTED, **variables}, num_gpus)


def test_a_process_looks_like_a_single_one() -> None:
    found = environment(OMP_NUM_THREADS="7")
    assert found == {
        **{"PAPA_MEMBER": "3", "PAPA_MEMBERS": "4", "PAPA_STORE": "10.0.0.1:29500", "PAPA_STORE_RUNS": "1"},
        **{"OMP_NUM_THREADS": "7", "HOME": "/home"},
    }
    assert environment(LOCAL_WORLD_SIZE="4")["PAPA_STORE"] == "127.0.0.1:29500"


def test_each_member_has_its_own_accelerator_and_share_of_cores() -> None:
    assert environment(num_gpus=8)["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment(num_gpus=1)["CUDA_VISIBLE_DEVICES"] == "0"
    assert environment(num_gpus=8, CUDA_VISIBLE_DEVICES="4,GPU-5,6")["CUDA_VISIBLE_DEVICES"] == "GPU-5"
    assert environment(num_gpus=8, CUDA_VISIBLE_DEVICES="")["CUDA_VISIBLE_DEVICES"] == ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert environment(OMP_NUM_THREADS="1")["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert environment("--threads", "3", OMP_NUM_THREADS="1")["OMP_NUM_THREADS"] == "3"


def test_ranks_that_train_one_member_keep_what_torchrun_says() -> None:
    found = environment("--member", "1", "--members", "2", "--store", "host:29400", num_gpus=8)
    assert found == {
        **{**STARTED, "PAPA_MEMBER": "1", "PAPA_MEMBERS": "2", "PAPA_STORE": "host:29400", "PAPA_STORE_RUNS": "0"}
    }
    with pytest.raises(ValueError, match="an asynchronous member has one process"):
        environment("--member", "1", "--members", "2", "--asynchronous", "published")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--member 0 train.py", "--member needs --members"),
        ("--member 2 --members 2 --store host:1 train.py", "--member is 2 of 2, expected 0 to 1"),
        ("--member 0 --members 2 train.py", "--member needs --store, where members meet, or --asynchronous"),
        ("--store host:1 train.py", "--store is for --member: without it, members meet at the store of torchrun"),
        ("--soup soup.safetensors", "the following arguments are required: script"),
    ],
)
def test_wrong_options(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments.split())
    assert message in capsys.readouterr().err


def test_wrong_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"RANK is not set: start it with torchrun --nproc-per-node 3 -m papa\.member"):
        environment_of(argparse.Namespace(member=None, asynchronous=None, script="train.py"), {})
    with pytest.raises(ConfigError, match="PAPA_MEMBER is '3' and PAPA_MEMBERS '3', expected an index"):
        member_of_environment({"PAPA_MEMBER": "3", "PAPA_MEMBERS": "3"})
    with pytest.raises(ConfigError, match=r"address is 'here', expected host and port"):
        connect_members(member=0, num_members=2, address="here")
    for name, value in {"PAPA_MEMBER": "0", "PAPA_MEMBERS": "2", "PAPA_STORE": "127.0.0.1:1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"one of 4 that train one member(.*)init_process_group\(\) before it joins"):
        group_of_environment()
