"""The command that runs all benchmarks: its table, and what it does about scripts that fail."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

import papa
from papa.training import Transforms

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return _module("_bench")


@pytest.fixture(scope="module")
def run() -> ModuleType:
    return _module("run")


def _module(name: str) -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


def write_script(folder: Path, name: str, *repetitions: str) -> None:
    """A script that prints different lines each time it runs."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "assert sys.argv[1:] == ['--json']\n"
        "seen = Path(__file__).with_suffix('.seen')\n"
        "number = len(seen.read_text()) if seen.exists() else 0\n"
        "seen.write_text('x' * (number + 1))\n"
        f"print({list(repetitions)!r}[number])\n"
    )


def cells_of(page: str, what: str) -> list[str]:
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {what}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def line(name: str, **values: float | None) -> str:
    numbers = "".join(f', "{key}": {"null" if value is None else value}' for key, value in values.items())
    return f'{{"name": "{name}"{numbers}}}'


def test_the_table_has_medians_and_ranges(run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "scripts", tmp_path / "out.md"
    write_script(
        folder,
        "tiny",
        *(line("push", seconds=s, ratio=r, target=1.4) for s, r in ((0.25, 1.3), (0.75, 1.5), (0.5, 1.0))),
    )
    arguments = ["--folder", str(folder), "--repeats", "3", "--out", str(out)]
    assert run.main(arguments) == 0
    page = out.read_text()
    assert cells_of(page, "push") == ["push", "500.0 ms", "1.300 [1.000, 1.500]", "<= 1.4", "ok (2 of 3)"]
    assert page.startswith("# Benchmarks\n")
    assert f"benchmarks/run {' '.join(arguments)}" in page
    assert "`python scripts/tiny.py --json`" in page
    assert "tiny.py, 3 of 3" in capsys.readouterr().err


def test_what_a_user_feels_leads_the_page(run: ModuleType, tmp_path: Path) -> None:
    script, name, words = run.LEADING[0]
    out = tmp_path / "out.md"
    write_script(tmp_path / "scripts", script, line(name, ratio=0.45, target=0.4) + "\n" + line("another", ratio=1.0))
    assert run.main(["--folder", str(tmp_path / "scripts"), "--repeats", "1", "--out", str(out)]) == 1
    page = out.read_text()
    assert cells_of(page, words) == [words, "0.450 [0.450, 0.450]", "<= 0.4", "**MISSED** (0 of 1 ok)"]
    assert page.index(words) < page.index("| what | time |")
    assert [line for line in page.splitlines() if line.startswith("|---|--:|--:|---|")] == ["|---|--:|--:|---|"]


def test_the_page_lists_machine_and_versions(run: ModuleType, tmp_path: Path) -> None:
    write_script(tmp_path / "scripts", "tiny", line("push", ratio=1.0))
    assert run.main(["--folder", str(tmp_path / "scripts"), "--repeats", "1", "--out", str(tmp_path / "out.md")]) == 0
    page = (tmp_path / "out.md").read_text()
    for fact in (f"torch: {torch.__version__}", f"papa: {papa.__version__}", f"{os.cpu_count()} cores", "GB"):
        assert fact in page


def test_memory_is_judged_by_megabytes(run: ModuleType, tmp_path: Path) -> None:
    write_script(tmp_path / "scripts", "tiny", line("peak", megabytes=9.0, ratio=1.0, target=8.0))
    assert run.main(["--folder", str(tmp_path / "scripts"), "--repeats", "1", "--out", str(tmp_path / "out.md")]) == 1
    cells = cells_of((tmp_path / "out.md").read_text(), "peak")
    assert cells[2:] == ["9.000 [9.000, 9.000] MB", "<= 8 MB", "**MISSED** (0 of 1 ok)"]


@pytest.mark.parametrize(
    ("output", "failure"),
    [
        ("this is a table", "a line is not a result"),
        ('{"ratio": 1.0}', "expected an object with a name"),
        ('{"name": "push", "ratio": "fast"}', "expected a number or null"),
        ('{"name": "push", "ratio": NaN}', "NaN is not a number"),
        ('{"name": "one"}\n{"name": "one"}', "two results with the name one"),
    ],
)
def test_a_failed_script_is_reported(
    run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str, failure: str
) -> None:
    folder, out = tmp_path / "scripts", tmp_path / "out.md"
    write_script(folder, "a_broken", output)
    (folder / "b_raises.py").write_text("raise SystemExit('no | disk')\n")
    (folder / "c_silent.py").write_text("")
    write_script(folder, "d_good", line("push", ratio=1.0, target=1.4))
    assert run.main(["--folder", str(folder), "--repeats", "1", "--out", str(out)]) == 1
    page = out.read_text()
    assert failure in page
    assert "papa: c_silent.py: no results\n" in capsys.readouterr().err
    assert "**FAILED**: exit status 1: no \\| disk" in page
    assert "**FAILED**: no results" in page
    assert cells_of(page, "push")[-1] == "ok"


def test_a_failed_repetition_keeps_the_others(run: ModuleType, tmp_path: Path) -> None:
    folder, out = tmp_path / "scripts", tmp_path / "out.md"
    write_script(folder, "tiny", line("push", ratio=1.0), "oh", line("push", ratio=3.0) + "\n" + line("new", ratio=2))
    assert run.main(["--folder", str(folder), "--repeats", "3", "--out", str(out)]) == 1
    page = out.read_text()
    assert cells_of(page, "push")[2] == "2.000 [1.000, 3.000]"
    assert cells_of(page, "new")[0] == "new (1 of 2 repetitions)"
    assert page.count("**FAILED**") == 1


def test_only_runs_the_named_scripts(run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "scripts"
    for name in ("push", "train", "soup"):
        write_script(folder, name, line(f"line of {name}", ratio=1.0))
    assert run.main(["--folder", str(folder), "--repeats", "1", "--only", "train,push"]) == 0
    page = capsys.readouterr().out
    assert page.index("line of train") < page.index("line of push")
    assert "soup" not in page
    with pytest.raises(SystemExit):
        run.main(["--folder", str(folder), "--only", "trian"])
    assert "did you mean train?" in capsys.readouterr().err


def test_text_written_by_hand_is_kept(run: ModuleType, tmp_path: Path) -> None:
    folder, out = tmp_path / "scripts", tmp_path / "out.md"
    write_script(folder, "tiny", line("push", ratio=1.0), line("push", ratio=1.0))
    (folder / run.PROSE).write_text("## Where the time goes\n\nIn convolutions.\n")
    for _ in range(2):
        run.main(["--folder", str(folder), "--repeats", "1", "--out", str(out)])
        assert out.read_text().endswith("|\n\n## Where the time goes\n\nIn convolutions.\n")


def test_a_busy_machine_is_reported(run: ModuleType) -> None:
    usage = run.Usage()
    usage.load = 3.0
    assert "load average was 3.00 before the first script" in usage.warning()
    usage.load, usage.busy = 0.0, None
    assert usage.warning() is None, "the load of other processes is unknown"


def test_results_survive_json(bench: ModuleType) -> None:
    for result in (
        bench.Result(name="a", seconds=0.1, ratio=1.2, target=1.4),
        bench.Result(name="b", megabytes=3.0, target=2.0, note="on a Tuesday"),
        bench.Result(name="c"),
    ):
        assert bench.Result.from_json(result.as_json()) == result


def test_nested_parts_are_counted_once(bench: ModuleType) -> None:
    parts = bench.Parts()
    inner = parts.timed("inner", lambda: sum(range(20_000)))
    outer = parts.timed("outer", lambda: inner() + inner())
    start = time.perf_counter()
    assert outer() == 2 * sum(range(20_000))
    elapsed = time.perf_counter() - start
    assert parts.seconds.keys() == {"inner", "outer"}
    assert 0.0 < sum(parts.seconds.values()) <= elapsed, "otherwise the inner calls are counted twice"


def test_where_time_goes_times_every_part() -> None:
    timed = _module("where_time_goes").Timed()
    backward = torch.Tensor.backward
    torch.Tensor.backward = timed.parts.timed("backward", backward)  # type: ignore[method-assign]
    data = (torch.randn(60, 4), torch.randint(2, (60,)))
    try:
        papa.train(
            *(lambda: torch.nn.Linear(4, 2), data),
            num_members=2,
            num_epochs=1,
            batch_size=20,
            transforms=Transforms(augment=lambda inputs, targets, generator: (inputs, targets)),
            callbacks=[timed],
        )
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
    expected = set(_module("where_time_goes").PARTS) - {"metrics and checkpoints"}  # nothing is recorded here
    assert set(timed.parts.seconds) == expected


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:FutureWarning")  # of torch.utils.mkldnn
def test_settings_are_tried_in_processes_whose_errors_are_raised(tmp_path: Path) -> None:
    variants = _module("step_variants")
    names = [variants.AS_SHIPPED, "weights in oneDNN's order"]
    with pytest.raises(papa.PapaError, match="cifar10"):
        variants.compare("an evaluation", names, tmp_path / "empty", rounds=1)
    _module("where_time_goes").write_images(tmp_path, num_train=100, num_test=20)
    shipped, packed = variants.compare("an evaluation", names, tmp_path, rounds=1)
    assert (shipped.ratio, packed.name) == (1.0, "an evaluation, weights in oneDNN's order")


def test_the_command_finds_the_scripts_of_the_repository(run: ModuleType) -> None:
    names = [script.stem for script in run.chosen_scripts(BENCHMARKS, None)]
    assert {"push", "train", "where_time_goes"} <= set(names)
    assert "run" not in names
    assert os.access(BENCHMARKS / "run", os.X_OK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--folder", "empty"], "--folder is empty, which contains no benchmarks"),
        (["--folder", "scripts", "--out", "nowhere/out.md"], "expected a file in an existing directory"),
        (["--folder", "scripts", "--out", "empty"], "expected a file in an existing directory"),
        (["--folder", "scripts", "--repeats", "0"], "0 is less than 1"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    run: ModuleType,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_script(tmp_path / "scripts", "tiny", line("push", ratio=1.0))
    with pytest.raises(SystemExit) as caught:
        run.main(arguments)
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "scripts" / "tiny.seen").exists()


def test_a_script_that_hangs_is_ended_and_reported(run: ModuleType, tmp_path: Path) -> None:
    folder, out = tmp_path / "scripts", tmp_path / "out.md"
    folder.mkdir()
    (folder / "slow.py").write_text("import time\ntime.sleep(600)\n")
    assert run.main(["--folder", str(folder), "--repeats", "1", "--minutes", "0.01", "--out", str(out)]) == 1
    assert "**FAILED**: not done after 0.01 minutes" in out.read_text()


def test_results_before_an_interruption_are_kept(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tmp_path / "scripts", tmp_path / "out.md"
    write_script(folder, "a_tiny", line("push", ratio=1.5))
    write_script(folder, "b_later", line("other", ratio=1.0))
    run_script = run.run_script

    def interrupted(script: Path, *arguments: object) -> None:
        if script.stem == "b_later":
            raise KeyboardInterrupt
        run_script(script, *arguments)

    monkeypatch.setattr(run, "run_script", interrupted)
    assert run.main(["--folder", str(folder), "--repeats", "1", "--out", str(out)]) == 130
    page = out.read_text()
    assert cells_of(page, "push")[2] == "1.500 [1.500, 1.500]"
    assert "**FAILED**: interrupted" in page


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_background_job_can_be_interrupted_and_keeps_its_results(number: signal.Signals, tmp_path: Path) -> None:
    folder, out, is_waiting = tmp_path / "scripts", tmp_path / "out.md", tmp_path / "waiting"
    write_script(folder, "a_tiny", line("push", ratio=1.5))
    (folder / "b_later.py").write_text(
        f"import time\nfrom pathlib import Path\nPath({str(is_waiting)!r}).touch()\ntime.sleep(600)\n"
    )
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--folder", str(folder), "--out", str(out)]
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts background jobs
    try:
        job = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGINT, ignored)
    while not is_waiting.exists():
        assert job.poll() is None
        time.sleep(0.05)
    job.send_signal(number)
    assert job.wait() == 130
    assert cells_of(out.read_text(), "push")[2] == "1.500 [1.500, 1.500]"
