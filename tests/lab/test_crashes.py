"""A handful of real kills; `make soak` has hundreds."""

import random
import time
from pathlib import Path

from crashes import Reader, differences, kill_at, options, run_to_end, small_config, start


def test_a_run_killed_at_random_moments_ends_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    generator = random.Random(1)
    arguments = [*options(8), "--workers", "1"]
    reader = Reader(small_config())
    begin = time.monotonic()
    assert run_to_end(["run", *arguments, "--out", str(whole)]) == 0
    duration = time.monotonic() - begin
    num_kills = 0
    for _ in range(5):
        process = start(["run", *arguments, "--out", str(killed), "--resume"])
        num_kills += kill_at(process, killed, generator, longest=duration / 2)
        reader.read_all(killed)
    assert num_kills > 0
    assert run_to_end(["run", *arguments, "--out", str(killed), "--resume"]) == 0
    assert list(differences(whole, killed)) == []
