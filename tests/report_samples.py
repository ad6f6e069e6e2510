"""Results and metrics as runs write them, with everything that a report can show, and with hostile names."""

from __future__ import annotations

import math
from typing import Any

HOSTILE = "</style></title><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{}%\\"


def make_scores(shift: float = 0.0) -> dict[str, Any]:
    return {
        "members": [90.0 + shift, 92.0 + shift],
        "mean": 91.0 + shift,
        "min": 90.0 + shift,
        "max": 92.0 + shift,
        "ensemble": 93.0 + shift,
        "average_soup": 92.5 + shift,
        "greedy_soup": 92.25 + shift,
    }


def make_result(method: str = "papa", seed: int = 1, shift: float = 0.0) -> dict[str, Any]:
    return {
        "recipe": "digits",
        "method": method,
        "seed": seed,
        "config": {"members": 2, "train": {"epochs": 2}, "data": {"name": "digits", "root": HOSTILE}},
        "environment": {"command": f"papa run --out '{HOSTILE}'", "torch": "2.6"},
        "test": make_scores(shift),
        "validation": make_scores(shift),
        "greedy_members": [0, 1],
        "seconds": {"train": 1.0, "average": 0.5},
        "num_averagings": 1,
        "policies": [{"mixup": 0.5}, {"mixup": HOSTILE}],
    }


def make_full_result() -> dict[str, Any]:
    """A result with all parts that a run can write."""
    coefficients = [index / 10 for index in range(11)]
    barrier = [4 * c * (1 - c) for c in coefficients]
    details = {key: {"accuracy": 80.0, HOSTILE: 50.0} for key in ("mean", "ensemble", "average_soup")}
    return {
        **make_result("papa-all"),
        "test": {**make_scores(), "details": details},
        "greedy_trials": [
            {"members": [1, 0], "score": 92.0, "kept": True},
            {"members": [1, 0, 2], "score": 91.0, "kept": False},
        ],
        "repaired": {"test": {"average_soup": 91.25, "greedy_soup": 91.5}, "greedy_members": [0]},
        "aligned": {"test": {"average_soup": 90.75, "greedy_soup": 90.5}},
        "similarity": {"layers": ["conv1", HOSTILE], "members": [0.9, 0.8], "soup": [0.95, 0.9]},
        "interpolation": {
            "pair": [0, 1],
            "curves": [
                {
                    "name": name,
                    "coefficients": coefficients,
                    "score": [95 - depth * height for height in barrier],
                    "loss": [0.1 + height for height in barrier],
                }
                for name, depth in (("plain", 80), (HOSTILE, 40))
            ],
        },
        "verdict": {
            "kind": "helps",
            "advice": "It helps: the soup is better than its members. Keep the strength.",
            "num_examples": 1200,
            "average_loss": 0.25,
            "gain": {"mean": 0.05, "error": 0.01, "sign": 1},
        },
        "communication": {"bytes": 2_500_000, "seconds": 0.25},
        "nonfinite": [
            {"event": "nonfinite", "step": 5, "member": 1, "reason": "loss is not finite", "action": "left out"}
        ],
        "paper": {"ensemble": 93.5, "average_soup": 92.75},
    }


def make_epoch(epoch: int, num_members: int = 2) -> dict[str, Any]:
    return {
        "event": "epoch",
        "step": 10 * epoch,
        "epoch": epoch,
        "lr": 0.1,
        "losses": [1 / epoch + member for member in range(num_members)],
        "validation": [50.0 + epoch + member for member in range(num_members)],
        "validation_ensemble": 65.0,
        "validation_average_soup": 64.0,
        "distances": [1.0 / epoch + member for member in range(num_members)],
        "spread": 0.25 / epoch,
    }


def make_averaging(step: int) -> dict[str, Any]:
    return {"event": "average", "step": step, "distance_before": 2.0 + math.sin(step), "distance_after": 1.0}


METRICS: list[dict[str, Any]] = [make_averaging(5), make_epoch(1), make_averaging(15), make_epoch(2)]

FULL_METRICS: list[dict[str, Any]] = [
    {**make_averaging(5), "bytes": 1000, "seconds": 0.001},
    {**make_averaging(10), "alpha": 0.5, "half_life": 5.0, "member_loss": 1.0, "average_loss": 0.75},
    {
        "event": "merge",
        "step": 5,
        "epoch": 0.5,
        "data": "test",
        "before": [50.0, 52.0],
        "after_unrepaired": [45.0, 45.0],
        "after": [60.0, 60.0],
        "later": [54.0, 55.0],
        "steps_later": 3,
    },
    make_epoch(1),
    {"event": "nonfinite", "step": 12, "member": 0, "reason": HOSTILE, "action": "replaced"},
    {"event": "checkpoint-failed", "step": 20, "error": "no space left on the device"},
    make_epoch(2) | {"test": [60.0, 61.0], "test_ensemble": 63.0, "test_average_soup": 62.0},
]
