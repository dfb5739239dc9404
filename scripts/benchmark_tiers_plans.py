r"""What the planner chose against the best in hindsight, and what snapshot policies cost.

    grid: tier of the blocks x length of the hit x where the last snapshot is
    ways: as the planner chooses; from the snapshot, all blocks loaded; replayed, likewise; cold
          every way is measured; regret = seconds of what was chosen / of the best - 1

A way is forced through the costs that the planner is told, never around it, so that each is exact.
Ways that turn out the same (start, snapshot or not, entries loaded) are one, with all samples.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from benchmark_tiers_moves import finish
from benchmark_tiers_requests import Lab

from hybridkv.arithmetic import round_down
from hybridkv.blocks.entries import Tier
from hybridkv.prefixes.cost import CostModel
from hybridkv.prefixes.plan import Plan, PlanOptions
from hybridkv.prefixes.policy import NEVER, POLICIES, SnapshotPolicy

NEW = 200
"""Tokens of a prompt that nobody has seen before."""
NOWHERE = 1e-9
"""Bytes a second: what is never worth it."""
PERIOD = 2048
Key = tuple[int, bool, int]
"""(start, whether from a snapshot, entries loaded): two plans of one key do the same."""
COLD: Key = (0, False, 0)


def forced(options: PlanOptions, *, replay: bool) -> PlanOptions:
    """Options under which the most is reused, from a snapshot or by a replay."""
    speeds = {Tier.DEVICE: NOWHERE} if replay else {}
    cost = CostModel(tile_seconds=1.0, bytes_per_second=speeds)
    return dataclasses.replace(options, cost=cost, replay=replay)


def request(lab: Lab, prompt: np.ndarray, namespace: str, policy: SnapshotPolicy) -> dict[str, Any]:
    """Seconds to the logits of a prompt's last token, and what it stored."""
    runner = lab.runner
    began = time.perf_counter()
    sequence = runner.start(prompt, namespace=namespace, policy=policy)
    runner.prefill(sequence)
    seconds = time.perf_counter() - began
    snapshots = len(sequence.snapshots_at) - sequence.skipped_snapshots
    runner.finish(sequence)
    return {"seconds": seconds, "reused": sequence.start, "snapshots": snapshots}


def snapshot_policies(position: int, tile: int) -> dict[str, SnapshotPolicy]:
    """So that the last snapshot of a prompt of ``position`` tokens is at its end, at its middle or
    nowhere.
    """
    middle = max(round_down(position // 2 + tile, tile), tile)
    return {
        "near": SnapshotPolicy(forks=False),
        "far": SnapshotPolicy.periodic(middle),
        "absent": NEVER,
    }


@dataclasses.dataclass(kw_only=True)
class Cell:
    """One place of the grid, and the samples of each way."""

    tier: Tier
    position: int
    snapshot: str
    chosen: Key = COLD
    seconds: dict[Key, list[float]] = dataclasses.field(default_factory=dict)
    expected: float = 0.0
    """Seconds, by the planner."""

    def result(self) -> dict[str, Any]:
        """Medians, and the regret of the choice."""
        medians = {key: float(np.median(values)) for key, values in self.seconds.items()}
        best = min(medians, key=lambda key: medians[key])
        return {
            "tier": self.tier.name.lower(),
            "position": self.position,
            "snapshot": self.snapshot,
            "chosen": words_of(self.chosen),
            "best": words_of(best),
            "expected_seconds": self.expected,
            "chosen_seconds": medians[self.chosen],
            "best_seconds": medians[best],
            "regret": medians[self.chosen] / medians[best] - 1,
            "ways": {words_of(key): value for key, value in medians.items()},
        }


def words_of(key: Key) -> str:
    """A way in words."""
    start, copied, loaded = key
    if key == COLD:
        return "cold"
    return f"{'snapshot' if copied else 'replay'} {start}" + (f", load {loaded}" if loaded else "")


def key_of(plan: Any) -> Key:
    """Of a plan or a miss."""
    if not isinstance(plan, Plan):
        return COLD
    return (plan.start, plan.snapshot >= 0, len(plan.loads))


def _measure_cell(
    lab: Lab, cell: Cell, base: np.ndarray, namespace: str, cold: list[float]
) -> None:
    runner = lab.runner
    usual = runner.plan_options
    sides = {
        "chosen": usual,
        "snapshot": forced(usual, replay=False),
        "replay": forced(usual, replay=True),
    }
    cell.seconds[COLD] = list(cold)
    for number in range(lab.args.rounds):
        for side in list(sides)[:: -1 if number % 2 else 1]:
            prompt = np.concatenate([base, lab.ids(NEW)])
            lab.only_on(cell.tier)
            try:
                runner.plan_options = sides[side]
                chain = runner.chain(prompt, namespace=namespace)
                plan = runner.plan(chain, namespace=namespace, loads=True)
                if side == "chosen":
                    cell.chosen, cell.expected = key_of(plan), plan.seconds
                if key_of(plan) != COLD:
                    seconds = request(lab, prompt, namespace, NEVER)["seconds"]
                    cell.seconds.setdefault(key_of(plan), []).append(seconds)
            finally:
                runner.plan_options = usual


def measure_choices(lab: Lab) -> dict[str, Any]:
    """The whole grid."""
    cells = []
    for position in lab.args.positions:
        cold = []
        for number in range(lab.args.rounds):
            prompt = lab.ids(position + NEW)
            cold.append(request(lab, prompt, f"cold {position} {number}", NEVER)["seconds"])
        for name, policy in snapshot_policies(position, lab.args.tile).items():
            base, namespace = lab.ids(position), f"grid {position} {name}"
            request(lab, base, namespace, policy)
            for tier in Tier:
                cell = Cell(tier=tier, position=position, snapshot=name)
                _measure_cell(lab, cell, base, namespace, cold)
                cells.append(cell.result())
    return summary(cells)


def summary(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Regret over all cells."""
    regrets = [cell["regret"] for cell in cells]
    chosen, best = (sum(cell[f"{x}_seconds"] for cell in cells) for x in ("chosen", "best"))
    return {
        "cells": list(cells),
        "largest_regret": max(regrets),
        "mean_regret": float(np.mean(regrets)),
        "regret_of_all": chosen / best - 1,
        "best_chosen": sum(cell["chosen"] == cell["best"] for cell in cells),
    }


def policies_to_measure() -> Mapping[str, SnapshotPolicy]:
    """The library's, and a period that a prompt of this benchmark can have."""
    return {**POLICIES, f"periodic, {PERIOD:,}": SnapshotPolicy.periodic(PERIOD)}


def measure_policies(lab: Lab) -> dict[str, Any]:
    """Bytes a million tokens, and first tokens of forks and continuations, by policy."""
    tokens, store = lab.args.policy_tokens, lab.mover.store
    assert store is not None
    rows, cold = {}, []
    for name, policy in policies_to_measure().items():
        base, namespace = lab.ids(tokens), f"policy {name}"
        before = store.bytes_used
        first = request(lab, base, namespace, policy)
        cold.append(first["seconds"])
        finish(lab.mover)
        rows[name] = {
            "snapshots": first["snapshots"],
            "gb_per_million": (store.bytes_used - before) / tokens / 1e3,
            "seconds": {
                f"{what} from {tier.name.lower()}": _hits(lab, base, namespace, what, tier)
                for tier in (Tier.DEVICE, Tier.DISK)
                for what in ("fork", "continuation")
            },
        }
    together = float(np.median(cold))
    for row in rows.values():
        row["share_of_cold"] = {what: x / together for what, x in row["seconds"].items()}
    return {"tokens": tokens, "cold_seconds": together, "policies": rows}


def _hits(lab: Lab, base: np.ndarray, namespace: str, what: str, tier: Tier) -> float:
    """Median seconds of prompts that go on from a base; every fork leaves it somewhere else.

    They write no snapshots, so that each is a first one.
    """
    seconds: list[float] = []
    for number in range(lab.args.rounds):
        at = len(base) * (2 * number + lab.args.rounds + 1) // (4 * lab.args.rounds)
        head = base if what == "continuation" else base[:at]
        lab.only_on(tier)
        prompt = np.concatenate([head, lab.ids(NEW)])
        seconds.append(request(lab, prompt, namespace, NEVER)["seconds"])
    return float(np.median(seconds))
