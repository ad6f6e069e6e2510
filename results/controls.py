"""Tables of the evidence: PAPA's soup beside everything else that the same data and compute can buy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from papa.lab.report.metric import metric_of
from papa.lab.report.table import gap_text, mean_gap_closed
from results.tables import (
    Record,
    Score,
    along_trajectory,
    by_seed,
    difference_table,
    markdown,
    mean_text,
    paired,
    score,
)


def best_by_validation(record: Record) -> float | None:
    """The test score of the member that is best on validation data; of equal ones the first."""
    found = [value for value in record["validation"]["members"] if value is not None]
    if not found:
        return None
    best = (max if metric_of([record]).higher_is_better else min)(found)
    value: float | None = record["test"]["members"][record["validation"]["members"].index(best)]
    return value


def best_epoch(record: Record) -> float | None:
    """The test score of the soup of the epoch that is best on validation data; for one network, early stopping."""
    kept = record.get("best_soup")
    return None if not kept or not kept.get("test") else kept["test"]["score"]


@dataclass(frozen=True, kw_only=True)
class Control:
    """A row of the table."""

    label: str
    role: str
    """Whose runs: `independent`, `papa` and so on for populations, `papa-same-init` for one initialisation of all
    members; `longer`, `larger-batches` or `distilled` for one network."""
    of: Score


SAME_INIT = "papa-same-init"
CONTROLS = (
    Control(label="one network (mean of p)", role="independent", of=score("mean")),
    Control(label="... with EMA (mean of p)", role="independent", of=along_trajectory("mean")),
    Control(label="the best of p by validation", role="independent", of=best_by_validation),
    Control(label="greedy soup of p independent networks", role="independent", of=score("greedy_soup")),
    Control(label="one network, p times longer", role="longer", of=score("mean")),
    Control(label="... with early stopping", role="longer", of=best_epoch),
    Control(label="... with EMA", role="longer", of=along_trajectory("mean")),
    Control(label="one network, distilled from the ensemble of p", role="distilled", of=score("mean")),
    Control(label="one network, batches p times larger", role="larger-batches", of=score("mean")),
    Control(label="PAPA-2, average soup", role="papa-2", of=score("average_soup")),
    Control(label="PAPA-all, average soup", role="papa-all", of=score("average_soup")),
    Control(label="**PAPA, average soup**", role="papa", of=score("average_soup")),
    Control(label="PAPA with EMA, average soup", role="papa", of=along_trajectory("average_soup")),
    Control(label="PAPA, same initial weights, average soup", role=SAME_INIT, of=score("average_soup")),
    Control(label="... with EMA, average soup", role=SAME_INIT, of=along_trajectory("average_soup")),
    Control(label="ensemble of p networks, all at inference", role="independent", of=score("ensemble")),
)


def role_of(record: Record) -> str:
    """What a run is compared as; see `Control.role`."""
    if record["config"]["train"].get("teacher"):
        return "distilled"
    if record["method"] == "papa" and record["config"]["diversity"].get("same_init"):
        return SAME_INIT
    return str(record["method"])


OURS: Mapping[str, Score] = {"PAPA": score("average_soup"), "PAPA with EMA": along_trajectory("average_soup")}
"""The soups that controls are compared with."""


def controls(records: Sequence[Record], soups: Sequence[str] = tuple(OURS)) -> str:
    """One row for each control: its test score, and `soups` of PAPA minus it."""
    roles: dict[str, list[Record]] = {}
    for record in records:
        roles.setdefault(role_of(record), []).append(record)
    metric, size = metric_of(records), str(max(record["config"]["members"] for record in records))
    papa = roles.get("papa", [])
    found = {name: OURS[name] for name in soups if any(OURS[name](record) is not None for record in papa)}
    rows = []
    for control in CONTROLS:
        runs = roles.get(control.role, [])
        if not any(control.of(record) is not None for record in runs):
            continue
        label = control.label.replace("of p", f"of {size}").replace("p times", f"{size} times")
        cells = (label, mean_text(list(map(control.of, runs)), metric.digits))
        less = (
            ""
            if control.label.strip("*") == f"{name}, average soup"
            else _less(papa, of, runs, control.of, metric.digits)
            for name, of in found.items()
        )
        rows.append((*cells, *less))
    head = ("", f"test {metric.name}", *(f"{name} less this" for name in found))
    return markdown(head, rows) + _closed(roles)


def _closed(roles: Mapping[str, list[Record]]) -> str:
    """A sentence on the gap between one network and the ensemble; empty where it is lost in the noise of seeds."""
    alone = roles.get("independent", [])
    gap = paired(by_seed(alone, score("ensemble")), by_seed(alone, score("mean")))
    if gap is None or gap.mean is None or abs(gap.mean) <= (gap.deviation or 0.0):
        return ""

    def share(role: str, soups: str | None = None) -> str:
        runs = [_as_if_apart(run) for run in roles.get(role, [])]
        return gap_text(mean_gap_closed(runs, [*roles.get("independent", []), *runs], soups))

    if not share("papa") or share("papa").startswith("below"):
        return ""
    with_ema = f", with EMA {found}" if (found := share("papa", "trajectory")) else ""
    others = [share(SAME_INIT), share(SAME_INIT, "trajectory")]
    same = f"; from the same initial weights {others[0]}, with EMA {others[1]}" if all(others) else ""
    return f"\n\nPAPA closes {share('papa')} of the gap to the ensemble{with_ema}{same}."


def _as_if_apart(record: Record) -> Record:
    """A run that is compared with independent members, whose initial weights always differ."""
    config = record["config"]
    return {**record, "config": {**config, "diversity": {**config["diversity"], "same_init": False}}}


def _less(papa: Sequence[Record], ours: Score, runs: Sequence[Record], theirs: Score, digits: int) -> str:
    """The mean of ours minus theirs over seeds, and its standard deviation."""
    difference = paired(by_seed(papa, ours), by_seed(runs, theirs))
    if difference is None or difference.mean is None:
        return ""
    spread = "" if difference.deviation is None else f" ({difference.deviation:.{digits}f})"
    return f"{difference.mean:+.{digits}f}{spread}"


def verdicts(records: Sequence[Record]) -> str:
    """The soups of PAPA, without and with EMA, minus each control, seed by seed."""
    papa = [record for record in records if role_of(record) == "papa"]
    rows = []
    for name, ours in (("PAPA", score("average_soup")), ("PAPA with EMA", along_trajectory("average_soup"))):
        for control in CONTROLS:
            runs = [record for record in records if role_of(record) == control.role]
            difference = paired(by_seed(papa, ours), by_seed(runs, control.of))
            if difference is not None and control.role != "papa":
                rows.append((f"{name} less {control.label}", difference))
    return difference_table(rows, metric_of(records).digits)


def both(detail: Callable[[Sequence[Record]], str]) -> Callable[[Sequence[Record]], str]:
    """The controls, the differences by seed, and another table."""
    return lambda records: "\n\n".join([controls(records), verdicts(records), detail(records)])
