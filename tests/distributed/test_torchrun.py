"""Processes started by torchrun: on one machine, on two, and restarted after one was killed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

import distributed_jobs
import fork_server
import group_jobs
import papa
from helpers import execute
from machines import Machines
from papa.cli import main
from papa.distributed.start import start_workers
from papa.distributed.torchrun import rank_of_torchrun
from papa.errors import ConfigError
from papa.lab.config import Config
from papa.lab.recipes import find
from papa.lab.runs import RunDirectory
from papa.storage.lock import Lock

ROOT = Path(papa.__file__).parents[2]
TIMEOUT = 150.0
"""Seconds that a test waits for processes; they take a few, unless the machine is busy."""

EPOCHS = 20
"""Enough for a worker to be killed before they are over."""
TORCHRUN = ("-m", "torch.distributed.run")


@pytest.fixture
def machines() -> Iterator[Machines]:
    found = Machines(str(os.getpid() % 100_000))
    try:
        found.connect()
    except (OSError, subprocess.CalledProcessError) as error:
        found.remove()
        reason = getattr(error, "stderr", b"").decode().strip() or str(error)
        pytest.skip(f"two machines need network namespaces, which are not permitted here: {reason}")
    yield found
    found.remove()


def wait_until(condition: Callable[[], bool], message: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.05)


def children(process: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except FileNotFoundError:
        return []


def is_worker(process: int) -> bool:
    try:
        return b"\0RANK=" in Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return False


def two_machine_config() -> Config:
    config = replace(find("digits").config(), members=3)
    train = replace(config.train, epochs=EPOCHS, batch_size=64)
    return replace(config, train=train, average=replace(config.average, every_steps=5))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `two_machine_config` in one process."""
    path = tmp_path_factory.mktemp("one") / "run"
    execute(two_machine_config(), path, workers=1)
    return path


def same_networks(first: Path, second: Path) -> bool:
    files = sorted(file.relative_to(first) for file in first.rglob("*.safetensors") if "checkpoint" not in file.parts)
    assert len(files) == 5
    return all(group_jobs.identical(load_file(first / file), load_file(second / file)) for file in files)


@contextlib.contextmanager
def ending(agents: list[subprocess.Popen[bytes]], path: Path) -> Iterator[None]:
    """Check after the block that all agents end without error; none is left running in any case."""
    try:
        yield
        wait_until(lambda: all_ended(agents), "the agents did not end")
        assert [agent.returncode for agent in agents] == [0, 0], logs(path)
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait()


def test_two_machines_with_a_killed_worker_have_the_bits_of_one_process(
    machines: Machines, one_process: Path, tmp_path: Path
) -> None:
    config, out = two_machine_config(), tmp_path / "two"
    options = ("--members", "3", "--train.epochs", str(EPOCHS), "--train.batch-size", "64")
    options += ("--average.every-steps", "5", "--out", str(out))
    rendezvous = ("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "4", "--rdzv-backend", "c10d")
    rendezvous += ("--rdzv-endpoint", f"{machines.addresses[0]}:29511", "--rdzv-id", "papa")
    agents = []
    for machine, address in enumerate(machines.addresses):
        # torchrun would find the host of the rendezvous by the machines' names, which are the same here.
        here = ("--rdzv-conf", f"is_host={1 - machine}", "--local-addr", address)
        command = (*TORCHRUN, *rendezvous, *here, "-m", "papa", "run", "digits", *options)
        agents.append(machines.start(machine, *command, log=tmp_path / f"agent-{machine}.log"))
    with ending(agents, tmp_path):
        checkpoints = RunDirectory(out).checkpoints
        wait_until(lambda: len(list(checkpoints.glob("step-*"))) == 2 or all_ended(agents), "no checkpoint was written")
        victims = [child for child in children(agents[1].pid) if is_worker(child)]
        assert len(victims) == 1, logs(tmp_path)
        assert not RunDirectory(out).is_finished
        os.kill(victims[0], signal.SIGKILL)
    assert same_networks(one_process, out)
    # One process resumes from the last epoch of the two machines.
    shutil.copytree(out, tmp_path / "resumed")
    resumed = RunDirectory(tmp_path / "resumed")
    resumed.result.unlink()
    newest = resumed.latest_checkpoint()
    assert newest is not None
    shutil.rmtree(newest)
    execute(config, resumed.path, workers=1, resume=True)
    assert same_networks(one_process, resumed.path)
    found = [event for event in RunDirectory(out).read_metrics() if event["event"] == "average"]
    assert [event["step"] for event in found] == list(range(5, config.train.epochs * 4 + 1, 5))
    assert all(event["bytes"] > 0 for event in found)


def test_a_machine_that_joins_takes_over_members_and_the_run_continues(one_process: Path, tmp_path: Path) -> None:
    out = tmp_path / "elastic"
    options = ("--members", "3", "--train.epochs", str(EPOCHS), "--train.batch-size", "64")
    options += ("--average.every-steps", "5", "--overwrite", "--out", str(out))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    rendezvous = ("--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    rendezvous += ("--local-addr", "127.0.0.1", "--monitor-interval", "0.1", "--rdzv-id", "papa", "--max-restarts", "0")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else new machines do not get the address
    agents: list[subprocess.Popen[bytes]] = []

    def join(is_host: int) -> None:
        here = ("--rdzv-conf", f"is_host={is_host},last_call_timeout=1")
        command = (sys.executable, *TORCHRUN, *rendezvous, *here, "-m", "papa", "run", "digits", *options)
        with open(tmp_path / f"agent-{len(agents)}.log", "wb") as log:
            agents.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))

    run = RunDirectory(out)
    with ending(agents, tmp_path):
        join(is_host=1)
        wait_until(
            lambda: len(list(run.checkpoints.glob("step-*"))) == 2 or all_ended(agents), "no checkpoint was written"
        )
        before = run.config.stat().st_ino
        (worker,) = (child for child in children(agents[0].pid) if is_worker(child))
        os.kill(worker, signal.SIGSTOP)  # it would finish before the other has joined
        join(is_host=0)
        wait_until(
            lambda: "closing signal" in logs(tmp_path) or all_ended(agents), "the first agent did not notice the second"
        )
        os.kill(worker, signal.SIGCONT)
    assert run.config.stat().st_ino == before
    assert run.read_result()["environment"]["workers"] == 2
    assert same_networks(one_process, out)


def test_a_job_that_a_scheduler_ends_is_saved_and_its_ranks_print_no_traceback(tmp_path: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "agent-0.log"
    options = ("--members", "2", "--train.epochs", "200", "--out", str(out))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = (sys.executable, *TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "papa", "run", "digits")
    with open(log, "wb") as file:
        agent = subprocess.Popen((*command, *options), stdout=file, stderr=file, env=environment)
    try:
        checkpoints = RunDirectory(out).checkpoints
        wait_until(lambda: any(checkpoints.glob("step-*")) or all_ended([agent]), "no checkpoint was written")
        agent.terminate()
        wait_until(lambda: all_ended([agent]), "torchrun did not end")
    finally:
        agent.kill()
        agent.wait()
    said = log.read_text()
    assert re.search(r"papa: stopped at step \d+ of \d+, and saved; continue with: papa resume", said), said
    own = re.findall(r"Traceback.*?SignalException: Process (\d+) got signal", said, re.DOTALL)
    assert said.count("Traceback") == len(own), said
    assert {*own} <= {str(agent.pid)}, "only torchrun's own process has one"
    assert not RunDirectory(out).is_finished


def all_ended(agents: list[subprocess.Popen[bytes]]) -> bool:
    return all(agent.poll() is not None for agent in agents)


def logs(path: Path) -> str:
    return "\n".join(file.read_text()[-3000:] for file in sorted(path.glob("agent-*.log")))


def test_the_example_runs_under_torchrun() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *TORCHRUN, "--standalone", "--nproc-per-node", "2", str(ROOT / "examples/torchrun.py")]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert found.returncode == 0, found.stderr
    score = re.search(r"one network of 2: (\d+\.\d)% of the training data", found.stdout)
    assert score is not None
    assert float(score[1]) > 55


def test_commands_under_torchrun_print_once_and_a_restart_keeps_checkpoints(tmp_path: Path) -> None:
    found = start_workers(distributed_jobs.commands, 2, 2, str(tmp_path))
    for name, ranks in found.items():
        assert [code for code, _, _ in ranks] == [2 if name == "compare, parallel" else 0] * 2, name
        assert [bool(output) for _, output, _ in ranks] == [name != "compare, parallel", False], name
    assert [found[name][0][2] for name in ("resume", "overwrite, restarted", "overwrite")] == [True, True, False]
    assert "take: " in found["resume"][0][1]
    assert found["compare"][0][1].count("\n") > 3
    assert (tmp_path / "compare" / "report.html").exists()


def test_different_options_and_unshared_directories_raise_at_the_start(tmp_path: Path) -> None:
    with Lock(tmp_path / "held" / ".lock"):
        found = start_workers(distributed_jobs.start_errors, 2, 2, str(tmp_path))
    assert found["seed"] == "MemberError: rank 1 has 2 as 'seed', rank 0 has 1: start all with the same options"
    assert "rank 1 has 0.0.0 as 'papa', rank 0 has" in found["version"]
    assert "rank 1 has True as 'resume', rank 0 has False" in found["resume"]
    assert found["too many"].startswith("ConfigError: there are 2 workers for 1 members")
    assert "--workers is 2, but torchrun sets the number of processes" in found["workers"]
    assert "the run directory must be on a file system that all machines share" in found["not shared"]
    assert "held is in use by another process" in found["in use"]
    assert [file.name for file in tmp_path.iterdir()] == ["rank-0"]


def start_two_ranks(job: str) -> list[subprocess.Popen[str]]:
    """Two processes that run a job of `distributed_jobs` with the variables that torchrun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", f"import distributed_jobs; distributed_jobs.{job}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, text=True, **pipes)  # type: ignore[call-overload]
        for rank in range(2)
    ]


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_lost_rank_raises_on_the_others(how: str, tmp_path: Path) -> None:
    rendezvous, said = f"file://{tmp_path}/rendezvous", tmp_path / "said"
    context = fork_server.context()
    ranks = [
        context.Process(target=distributed_jobs.lose_rank_1, args=(how, rank, rendezvous, said)) for rank in range(2)
    ]
    try:
        for process in ranks:
            process.start()
        ranks[0].join(timeout=TIMEOUT)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    output = said.read_text()
    assert "LostError: rank 0 lost the connection to the other processes while" in output
    assert "one of them failed, was killed or cannot be reached" in output
    assert "(cause: RuntimeError)" in output
    assert "gloo" not in output


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(missing: str) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    del environment[missing]
    with pytest.raises(ConfigError, match=f"{missing} is not set, though this looks like a process of torchrun"):
        rank_of_torchrun(environment)
    with pytest.raises(ConfigError, match="RANK is 'first', expected a whole number"):
        rank_of_torchrun({**environment, missing: "1", "RANK": "first"})


def test_an_invalid_rank_raises() -> None:
    environment = {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    with pytest.raises(ConfigError, match=r"RANK is 2, expected less than WORLD_SIZE \(2\)"):
        rank_of_torchrun(environment)


def test_a_port_in_use_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert main(["run", "digits", "--out", str(tmp_path / "run")]) == 2
    assert f"port {port} is in use: choose another with torchrun --master-port" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
