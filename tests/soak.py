"""What is too long for the tests: hundreds of kills, and an hour of training with kills, resumes and an eye on memory.

    python tests/soak.py --kills 200 --minutes 60

Exits with 1 when a run ended with other bits, a checkpoint could not be read, or memory grew.
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
"""Resident memory at the end against that after the first minute of a process."""
MINUTES_BETWEEN_KILLS = (2.0, 8.0)
CALM_OPTIONS = ["--average.every-steps", "20", "--average.repair", "0", "--workers", "1"]
SHARE_OF_TWO_WORKERS = 0.1
SECONDS_TO_START_WORKERS = 8.0


def soak_kills(folder: Path, num_kills: int, seed: int) -> list[tuple[str, object, bool]]:
    """Kill runs of one worker, now and then of two, until there were enough kills; compare those that finish."""
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
        ("... of them of runs of two workers", of_two, True),
        ("... of them while a checkpoint was being written", writing, True),
        ("checkpoints read back whole after a kill", read, True),
        ("runs that came to their end", finished, finished > 0),
        ("... of them with other bits than the whole run", different, different == 0),
    ]


def command(*arguments: str) -> list[str]:
    """The command line in a process of its own."""
    return [sys.executable, "-m", "papa", *arguments]


def resident_megabytes(pid: int) -> float | None:
    """What a process holds in memory; None when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    values = [int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")]
    return values[0] if values else None


class Life:
    """One process, and its memory while it trains."""

    def __init__(self, arguments: list[str], path: Path) -> None:
        self.path, self.began = path, time.monotonic()
        self.process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL)
        self.samples: list[tuple[float, float]] = []

    def sample(self) -> None:
        """Look at its memory, as long as it trains: the end of a run makes its report all at once."""
        is_training = not (self.path / "members" / "000.safetensors").exists()
        megabytes = resident_megabytes(self.process.pid)
        if is_training and megabytes is not None:
            self.samples.append((time.monotonic() - self.began, megabytes))

    def growth(self) -> tuple[float, float, float] | None:
        """Megabytes after a minute, at the end, and the ratio; None for one that did not live for two minutes."""
        later = [megabytes for seconds, megabytes in self.samples if seconds >= 60.0]
        if not later or self.samples[-1][0] < 120.0:
            return None
        return later[0], later[-1], later[-1] / later[0]


@dataclass
class Seen:
    """What was seen of some rounds."""

    rounds: int = 0
    epochs: int = 0
    kills: int = 0
    stops: int = 0
    broken: list[str] = field(default_factory=list)
    growths: list[tuple[float, float, float]] = field(default_factory=list)
    calm_growths: list[tuple[float, float, float]] = field(default_factory=list)


def soak_hour(folder: Path, minutes: float, seed: int) -> list[tuple[str, object, bool]]:
    """Runs that are left alone and runs that are killed and resumed, side by side, until the time is over."""
    generator, seen, begin = random.Random(seed), Seen(), time.monotonic()
    epochs_per_minute = _pace(folder)
    while (left := minutes - (time.monotonic() - begin) / 60) > 0 and not seen.broken:
        round_began = time.monotonic()
        num_epochs = max(20, int(left * epochs_per_minute))
        _round(folder, num_epochs, seen, generator)
        epochs_per_minute = num_epochs / ((time.monotonic() - round_began) / 60)
    worst = max((ratio for _, _, ratio in seen.growths), default=0.0)
    calm = ", ".join(f"{first:.1f} -> {last:.1f}" for first, last, _ in seen.calm_growths)
    return [
        ("minutes of training", f"{(time.monotonic() - begin) / 60:.1f}", True),
        ("rounds, epochs", f"{seen.rounds}, {seen.epochs}", True),
        ("kills (SIGKILL), stops (SIGTERM)", f"{seen.kills}, {seen.stops}", True),
        ("what differs from a run left alone, or failed", seen.broken or "nothing", not seen.broken),
        ("memory after a minute and at the end of runs left alone, MB", calm or "none lived long enough", True),
        (f"worst growth of {len(seen.growths)} processes", f"{worst:.3f}", worst <= MOST_GROWTH),
    ]


def _round(folder: Path, num_epochs: int, seen: Seen, generator: random.Random) -> None:
    arguments = [*options(num_epochs), *CALM_OPTIONS]
    whole, killed = folder / f"whole-{seen.rounds}", folder / f"hour-{seen.rounds}"
    calm = Life(["run", *arguments, "--out", str(whole)], whole)
    lives = [Life(["run", *arguments, "--out", str(killed)], killed)]
    next_kill = time.monotonic() + 60.0 * generator.uniform(*MINUTES_BETWEEN_KILLS)
    while calm.process.poll() is None or lives[-1].process.poll() is None:
        time.sleep(2.0)
        calm.sample()
        lives[-1].sample()
        if time.monotonic() > next_kill and lives[-1].process.poll() is None:
            lives[-1].process.send_signal(signal.SIGKILL if generator.random() < 0.7 else signal.SIGTERM)
            code = lives[-1].process.wait()
            seen.kills, seen.stops = seen.kills + (code == -signal.SIGKILL), seen.stops + (code == STOPPED)
            if code not in (0, STOPPED, -signal.SIGKILL):
                seen.broken.append(f"exit code {code}")
            lives.append(Life(["resume", str(killed), "--workers", "1"], killed))
            next_kill = time.monotonic() + 60.0 * generator.uniform(*MINUTES_BETWEEN_KILLS)
    codes = (calm.process.returncode, lives[-1].process.returncode)
    seen.broken += list(differences(whole, killed)) if codes == (0, 0) else [f"exit codes {codes}"]
    seen.rounds, seen.epochs = seen.rounds + 1, seen.epochs + num_epochs
    seen.growths += [growth for life in (calm, *lives) if (growth := life.growth()) is not None]
    seen.calm_growths += [growth for growth in [calm.growth()] if growth is not None]


def _pace(folder: Path) -> float:
    """Epochs per minute, with two runs side by side."""
    paths, num_epochs = [folder / "pace-0", folder / "pace-1"], 60
    arguments = [*options(num_epochs), *CALM_OPTIONS]
    begin = time.monotonic()
    processes = [
        subprocess.Popen(command("run", *arguments, "--out", str(path)), stdout=subprocess.DEVNULL) for path in paths
    ]
    assert all(process.wait() == 0 for process in processes)
    return num_epochs / ((time.monotonic() - begin) / 60)


def main() -> None:
    """Soak, and print what was seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="how often a run is killed; 0 to leave this part out")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long to train under watch; 0 to leave it out")
    parser.add_argument("--seed", type=int, default=1, help="of the moments at which runs are killed")
    parser.add_argument("--keep", type=Path, help="where the runs go, to look at them afterwards")
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
