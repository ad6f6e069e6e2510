"""A soak test, too long for the test suite: hundreds of kills, and an hour of training with kills and resumes.

    python tests/soak.py --kills 200 --minutes 60

Exits with 1 if a run ended with different bits, a checkpoint could not be read, or memory grew.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from crashes import Reader, differences, is_writing, kill_at, options, run_to_end, small_config, start
from papa.cli.main import STOPPED

MOST_GROWTH = 1.05
"""The allowed ratio of resident memory at the end of a process to that after its first minute."""
MINUTES_BETWEEN_KILLS = (2.0, 8.0)
HOUR_OPTIONS = ["--average.every-steps", "20", "--average.repair", "0", "--workers", "1"]
SHARE_OF_TWO_WORKERS = 0.1
SECONDS_TO_START_WORKERS = 8.0


def soak_kills(folder: Path, num_kills: int, seed: int) -> list[tuple[str, object, bool]]:
    """Kill runs of one worker, sometimes of two, `num_kills` times; compare those that finish."""
    generator, whole = random.Random(seed), folder / "whole"
    reader = Reader(small_config())
    arguments = options(12)
    begin = time.monotonic()
    assert run_to_end(["run", *arguments, "--out", str(whole), "--workers", "1"]) == 0
    duration = time.monotonic() - begin
    kills = of_two = writing = finished = read = different = run = 0
    killed = folder / "killed-0"
    while kills < num_kills or killed.exists():
        workers = 2 if generator.random() < SHARE_OF_TWO_WORKERS else 1
        longest = duration / 3 if workers == 1 else duration / 3 + SECONDS_TO_START_WORKERS
        process = start(["run", *arguments, "--out", str(killed), "--workers", str(workers), "--resume"])
        if kills < num_kills and kill_at(process, killed, generator, longest=longest):
            kills += 1
            of_two += workers == 2
            writing += is_writing(killed)
        process.join()
        read += reader.read_all(killed)
        if process.exitcode == 0:
            finished += 1
            different += bool(list(differences(whole, killed)))
            subprocess.run(["rm", "-rf", str(killed)], check=True)
            run += 1
            killed = folder / f"killed-{run}"
        elif process.exitcode != -signal.SIGKILL:
            raise SystemExit(f"a resumed run ended with code {process.exitcode}: see {killed}")
    return [
        ("kills", kills, kills >= num_kills),
        ("... of runs with two workers", of_two, True),
        ("... while a checkpoint was being written", writing, True),
        ("checkpoints read after a kill", read, True),
        ("finished runs", finished, finished > 0),
        ("... of them with different bits than an undisturbed run", different, different == 0),
    ]


def command(*arguments: str) -> list[str]:
    """The command line of a separate process."""
    return [sys.executable, "-m", "papa", *arguments]


def resident_megabytes(pid: int) -> float | None:
    """The resident memory of a process; None if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    values = [int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")]
    return values[0] if values else None


class Process:
    """One process, and samples of its memory during training."""

    def __init__(self, arguments: list[str], path: Path) -> None:
        self.path, self.began = path, time.monotonic()
        self.process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL)
        self.samples: list[tuple[float, float]] = []

    def sample(self) -> None:
        """Sample its memory during training; soups and report at the end need more."""
        is_training = not (self.path / "members" / "000.safetensors").exists()
        megabytes = resident_megabytes(self.process.pid)
        if is_training and megabytes is not None:
            self.samples.append((time.monotonic() - self.began, megabytes))

    def growth(self) -> tuple[float, float, float] | None:
        """Megabytes after a minute, at the end, and the ratio; None for a process of less than two minutes."""
        later = [megabytes for seconds, megabytes in self.samples if seconds >= 60.0]
        if not later or self.samples[-1][0] < 120.0:
            return None
        return later[0], later[-1], later[-1] / later[0]


@dataclass
class Summary:
    """What happened in all rounds."""

    rounds: int = 0
    epochs: int = 0
    kills: int = 0
    stops: int = 0
    failures: list[str] = field(default_factory=list)
    growths: list[tuple[float, float, float]] = field(default_factory=list)
    undisturbed_growths: list[tuple[float, float, float]] = field(default_factory=list)


def soak_hour(folder: Path, minutes: float, seed: int) -> list[tuple[str, object, bool]]:
    """Undisturbed runs beside runs that are killed and resumed, until the time is over."""
    generator, summary, begin = random.Random(seed), Summary(), time.monotonic()
    epochs_per_minute = _pace(folder)
    while (left := minutes - (time.monotonic() - begin) / 60) > 0 and not summary.failures:
        round_began = time.monotonic()
        num_epochs = max(20, int(left * epochs_per_minute))
        _round(folder, num_epochs, summary, generator)
        epochs_per_minute = num_epochs / ((time.monotonic() - round_began) / 60)
    worst = max((ratio for _, _, ratio in summary.growths), default=0.0)
    undisturbed = ", ".join(f"{first:.1f} -> {last:.1f}" for first, last, _ in summary.undisturbed_growths)
    return [
        ("minutes of training", f"{(time.monotonic() - begin) / 60:.1f}", True),
        ("rounds, epochs", f"{summary.rounds}, {summary.epochs}", True),
        ("kills (SIGKILL), stops (SIGTERM)", f"{summary.kills}, {summary.stops}", True),
        ("differences from an undisturbed run, and failures", summary.failures or "nothing", not summary.failures),
        ("memory after a minute and at the end of undisturbed runs, MB", undisturbed or "none ran long enough", True),
        (f"worst growth of {len(summary.growths)} processes", f"{worst:.3f}", worst <= MOST_GROWTH),
    ]


def _round(folder: Path, num_epochs: int, summary: Summary, generator: random.Random) -> None:
    arguments = [*options(num_epochs), *HOUR_OPTIONS]
    whole, killed = folder / f"whole-{summary.rounds}", folder / f"hour-{summary.rounds}"
    undisturbed = Process(["run", *arguments, "--out", str(whole)], whole)
    processes = [Process(["run", *arguments, "--out", str(killed)], killed)]
    next_kill = time.monotonic() + 60.0 * generator.uniform(*MINUTES_BETWEEN_KILLS)
    while undisturbed.process.poll() is None or processes[-1].process.poll() is None:
        time.sleep(2.0)
        undisturbed.sample()
        processes[-1].sample()
        if time.monotonic() > next_kill and processes[-1].process.poll() is None:
            processes[-1].process.send_signal(signal.SIGKILL if generator.random() < 0.7 else signal.SIGTERM)
            code = processes[-1].process.wait()
            summary.kills, summary.stops = summary.kills + (code == -signal.SIGKILL), summary.stops + (code == STOPPED)
            if code not in (0, STOPPED, -signal.SIGKILL):
                summary.failures.append(f"exit code {code}")
            processes.append(Process(["resume", str(killed), "--workers", "1"], killed))
            next_kill = time.monotonic() + 60.0 * generator.uniform(*MINUTES_BETWEEN_KILLS)
    codes = (undisturbed.process.returncode, processes[-1].process.returncode)
    summary.failures += list(differences(whole, killed)) if codes == (0, 0) else [f"exit codes {codes}"]
    summary.rounds, summary.epochs = summary.rounds + 1, summary.epochs + num_epochs
    summary.growths += [growth for process in (undisturbed, *processes) if (growth := process.growth()) is not None]
    summary.undisturbed_growths += [growth for growth in [undisturbed.growth()] if growth is not None]


def _pace(folder: Path) -> float:
    """Epochs per minute of two parallel runs."""
    paths, num_epochs = [folder / "pace-0", folder / "pace-1"], 60
    arguments = [*options(num_epochs), *HOUR_OPTIONS]
    begin = time.monotonic()
    processes = [
        subprocess.Popen(command("run", *arguments, "--out", str(path)), stdout=subprocess.DEVNULL) for path in paths
    ]
    assert all(process.wait() == 0 for process in processes)
    return num_epochs / ((time.monotonic() - begin) / 60)


def main() -> None:
    """Run the soak test and print a summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="number of kills; 0 to skip this part")
    parser.add_argument("--minutes", type=float, default=60.0, help="minutes of training; 0 to skip this part")
    parser.add_argument("--seed", type=int, default=1, help="seed of the times of the kills")
    parser.add_argument("--keep", type=Path, help="folder in which the runs are kept")
    chosen = parser.parse_args()
    rows: list[tuple[str, object, bool]] = []
    with tempfile.TemporaryDirectory(prefix="papa-soak-") as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if chosen.kills:
            rows += soak_kills(folder, chosen.kills, chosen.seed)
        if chosen.minutes:
            rows += soak_hour(folder, chosen.minutes, chosen.seed)
    width = max(len(name) for name, _, _ in rows)
    for name, value, is_good in rows:
        sys.stdout.write(f"{name:{width}}  {value}{'' if is_good else '   FAILED'}\n")
    sys.exit(0 if all(is_good for _, _, is_good in rows) else 1)


if __name__ == "__main__":
    main()
