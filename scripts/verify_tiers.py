r"""Restores from every tier against cold runs, bit for bit: ``verify.py restore --tiers``.

    policy x tier x resume position x state copied or replayed x neighbours at work or not
       \--> device | host | disk | mixed: its first part on the first tier, its last on the last
       \--> restarted: the same from disk in a new process
    conversations whose process is killed in their third turn, and which go on in a new one

A cell is right when the logits of each computed tile and of the tokens decoded after have the bits
of the cold run, those of its neighbours the bits they have alone, and the plan is the one that
follows from the snapshots: with loads of exactly what is needed and elsewhere, from the tiers where
it is. ``tier_lab`` runs the cells, ``tier_restarts`` the other processes.
"""

import dataclasses
import itertools
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import command_line
import numpy as np
import tier_restarts
from tier_lab import Cell, Fork, Lab, Stored
from tier_restarts import Written
from verify_restore import LONGEST, TILE

from hybridkv.arithmetic import cdiv
from hybridkv.blocks.entries import Tier
from hybridkv.errors import UserError
from hybridkv.prefixes.policy import POLICIES, SnapshotPolicy

CELLS = 1540
"""Of a run that does not say how many: 22 a model, tier and policy."""
MIXED, RESTARTED = "mixed", "restarted"
PERIOD = 3 * TILE
"""Stands for the period of a policy that has one, which is longer than these prompts."""


def tiers_of(text: str) -> tuple[Tier, ...]:
    """Tiers of a comma-separated list, fastest first.

    Raises:
      UserError: one is none, or the device is missing.
    """
    names = {tier.name.lower(): tier for tier in Tier}
    wanted = [part.strip() for part in text.split(",")]
    for name in wanted:
        if name not in names:
            raise UserError(f"--tiers has {name!r}: give some of {','.join(names)}")
    if "device" not in wanted:
        raise UserError("--tiers lacks device, where everything is computed: add it")
    return tuple(sorted({names[name] for name in wanted}))


def policies_of(text: str) -> dict[str, SnapshotPolicy]:
    """Policies of a comma-separated list or ``all``, in the order of ``POLICIES``.

    Raises:
      UserError: one is none.
    """
    wanted = list(POLICIES) if text == "all" else [part.strip() for part in text.split(",")]
    for name in wanted:
        if name not in POLICIES:
            raise UserError(f"--policies has {name!r}: give all, or some of {','.join(POLICIES)}")
    return {name: _scaled(POLICIES[name]) for name in POLICIES if name in wanted}


def _scaled(policy: SnapshotPolicy) -> SnapshotPolicy:
    return dataclasses.replace(policy, period=PERIOD) if policy.period else policy


def layouts_of(tiers: Sequence[Tier]) -> dict[str, tuple[Tier, ...]]:
    """Name to tiers of the parts of a prompt."""
    layouts: dict[str, tuple[Tier, ...]] = {tier.name.lower(): (tier,) for tier in tiers}
    return layouts | ({MIXED: tuple(tiers)} if len(tiers) > 1 else {})


def cells_of(forks: Sequence[Fork], stored: Stored, rng: np.random.Generator) -> list[Cell]:
    """Every one of a stored prompt, in random order."""
    cells = [
        Cell(fork=number, state=state, neighbours=neighbours)
        for number, fork in enumerate(forks)
        for state in (True, False)
        for neighbours in (False, True)
        if state or any(position <= fork.position for position in stored.snapshots)
    ]
    return [cells[i] for i in rng.permutation(len(cells))]


class Prompts:
    """Prompts and what leaves them at every boundary, the same for all tiers and policies."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._made: list[tuple[np.ndarray, list[Fork]]] = []

    def __getitem__(self, number: int) -> tuple[np.ndarray, list[Fork]]:
        """Token ids, and forks with their cold runs."""
        while number >= len(self._made):
            ids = self._lab.ids(LONGEST)
            forks = [self._lab.fork(ids, at) for at in range(TILE, LONGEST + 1, TILE)]
            self._made.append((ids, forks))
        return self._made[number]


def verify(
    lab: Lab, tiers: Sequence[Tier], policies: Mapping[str, SnapshotPolicy], each: int
) -> tuple[list[dict[str, Any]], list[Written]]:
    """``each`` cells a tier and policy of one model.

    Returns a row a cell, and what was left in the store to be found again.
    """
    rows: list[dict[str, Any]] = []
    written: list[Written] = []
    prompts = Prompts(lab)
    for tier, layout in layouts_of(tiers).items():
        for name, policy in policies.items():
            left = each
            for number in itertools.count():
                ids, forks = prompts[number]
                stored = lab.store(ids, name, policy)
                cells = cells_of(forks, stored, lab.rng)[:left]
                for cell in cells:
                    row = lab.restore(stored, layout, forks[cell.fork], cell)
                    rows.append({"model": lab.model, "tier": tier, **row})
                lab.place(stored, layout)
                if layout == (Tier.DISK,):
                    written.append(Written.of(stored, [(forks[x.fork], x) for x in cells]))
                else:
                    lab.withdraw(stored)
                left -= len(cells)
                if not left:
                    break
    return rows, written


def report(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Prints a table a model, by tier and policy; returns the lines of all."""
    counts = ("cells", "copied", "replayed", "mismatches", "other plans", "compiled")
    lines: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        key = {name: row[name] for name in ("model", "tier", "policy")}
        line = lines.setdefault(tuple(key.values()), key | dict.fromkeys(counts, 0))
        line["cells"] += 1
        line["copied"] += row["copied"]
        line["replayed"] += row["replayed"]
        line["mismatches"] += not row["equal"]
        line["other plans"] += not row["planned"]
        line["compiled"] += row["compilations"]
    columns = ["tier", "policy", "cells", "replayed", "mismatches", "other plans", "compiled"]
    for model in dict.fromkeys(line["model"] for line in lines.values()):
        command_line.print_table(
            f"{model} on {command_line.device_name()}: restored from tiers against cold runs",
            columns,
            [[x[name] for name in columns] for x in lines.values() if x["model"] == model],
        )
    return list(lines.values())


def right(line: Mapping[str, Any]) -> bool:
    """Whether a line of the table has nothing against it."""
    return not (line["mismatches"] or line["other plans"] or line["compiled"])


def report_conversations(talks: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table by model and policy."""
    command_line.print_table(
        "conversations: killed in their third turn and gone on with in a new process, against "
        "unbroken ones",
        ["model", "policy", "prompt", "reused", "replayed", "tokens", "equal"],
        [
            (
                *(talk[key] for key in ("model", "policy", "prompt", "reused", "replayed")),
                talk["tokens"],
                "yes" if talk["right"] else "NO",
            )
            for talk in talks
        ],
    )


def run(
    models: Sequence[str],
    tiers: Sequence[Tier],
    policies: Mapping[str, SnapshotPolicy],
    *,
    cells: int,
    seed: int,
) -> tuple[bool, dict[str, Any]]:
    """All of it, with tables; whether everything was right, and the result.

    Raises:
      UserError: nothing could be stored here, or a process could not be run.
    """
    disk = Tier.DISK in tiers
    each = max(1, cells // (len(models) * len(policies) * (len(layouts_of(tiers)) + disk)))
    prompts = len(policies) * cdiv(each, LONGEST // TILE) if disk else 1
    rows: list[dict[str, Any]] = []
    stores: dict[str, list[Written]] = {}
    talks: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hybridkv-tiers-") as name:
        folder = pathlib.Path(name)
        for model in models:
            lab = Lab(model, tiers, folder / model, prompts=prompts, seed=seed)
            found, stores[model] = verify(lab, tiers, policies, each)
            rows += found
            if not lab.runner.close():
                raise UserError(f"what {model} stored was not written in time: try again")
        if disk:
            again = tier_restarts.again(folder, stores, tiers, prompts)
            rows += [{**row, "tier": RESTARTED} for row in again]
            talks = tier_restarts.conversations(folder, models, tiers, policies, seed)
    lines = report(rows)
    if talks:
        report_conversations(talks)
    ok = all(map(right, lines)) and all(talk["right"] for talk in talks)
    wrong = [row for row in rows if not (row["equal"] and row["planned"])]
    return ok, {"rows": lines, "wrong": wrong, "conversations": talks}
