r"""Other processes over the same store, for ``verify.py restore --tiers``.

    first process                            folder               new process
    cells with their cold digests  --------> store, cells.json    the same cells from disk
    conversation, SIGKILL in turn three ---> store                turn three  == ? ==  unbroken

    python scripts/tier_restarts.py cells | talk | resume JOB RESULT    is run by the script itself

A job and a result are JSON. A process that is started begins with nothing but them and the store.
"""

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import command_line
import jax
import numpy as np
import verify_engine
import verify_restore
from tier_lab import LOADS_PAY, PATIENCE_S, Cell, Fork, Lab, Stored, not_there

from hybridkv.blocks.entries import Tier
from hybridkv.blocks.pools import PoolSizes
from hybridkv.engine.engine import Engine
from hybridkv.engine.requests import Output, Request
from hybridkv.engine.sampling import SamplingOptions
from hybridkv.errors import UserError
from hybridkv.prefixes.policy import SnapshotPolicy
from hybridkv.tiers.faults import kill_process
from hybridkv.tiers.options import NOTHING, TierOptions

CONFIG = (
    "jax_compilation_cache_dir",
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_platforms",
)
"""What a new process takes over: all that identity depends on, and where compiled steps are."""
TURNS, SAID, ANSWERED = 3, 37, 19
"""Turns of a conversation, and tokens of each."""
SAMPLINGS = (SamplingOptions(), SamplingOptions(temperature=0.9, top_k=40, seed=5))
"""By turns, one a conversation."""
LONGEST_S = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Written:
    """What is in a store, and what cells of it gave."""

    policy: str
    namespace: str
    ids: np.ndarray
    blocks: int
    snapshots: tuple[int, ...]
    """Positions."""
    cells: tuple[tuple[Fork, Cell], ...]

    @classmethod
    def of(cls, stored: Stored, cells: Sequence[tuple[Fork, Cell]]) -> "Written":
        """Of what is published."""
        return cls(
            policy=stored.policy,
            namespace=stored.namespace,
            ids=stored.ids,
            blocks=len(stored.blocks),
            snapshots=tuple(stored.snapshots),
            cells=tuple(cells),
        )

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        cells = [[_plain(fork), _plain(cell)] for fork, cell in self.cells]
        return _plain(dataclasses.replace(self, cells=())) | {"cells": cells}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Written":
        """The inverse of ``to_json``."""
        cells = tuple((_fork(fork), Cell(**cell)) for fork, cell in value["cells"])
        fields = {
            "cells": cells,
            "ids": np.asarray(value["ids"], np.int32),
            "snapshots": tuple(value["snapshots"]),
        }
        return cls(**{**value, **fields})


def _plain(value: Any) -> dict[str, Any]:
    fields = dataclasses.asdict(value)
    return {k: x.tolist() if isinstance(x, np.ndarray) else x for k, x in fields.items()}


def _fork(value: Mapping[str, Any]) -> Fork:
    arrays = {name: np.asarray(value[name], np.int32) for name in ("ids", "after")}
    return Fork(**{**value, **arrays, "tiles": tuple(value["tiles"])})


# In the first process.


def again(
    folder: pathlib.Path,
    stores: Mapping[str, Sequence[Written]],
    tiers: Sequence[Tier],
    prompts: int,
) -> list[dict[str, Any]]:
    """Rows of the same cells from disk, in a new process.

    Args:
      folder: with a store a model.
      stores: what is in them.
      tiers: as before.
      prompts: that are stored, at most.

    Raises:
      UserError: the process failed.
    """
    models = {model: [each.to_json() for each in written] for model, written in stores.items()}
    job = {"models": models, "tiers": [int(tier) for tier in tiers], "prompts": prompts}
    rows: list[dict[str, Any]] = spawn("cells", job, folder)["rows"]
    return rows


def conversations(
    folder: pathlib.Path,
    models: Sequence[str],
    tiers: Sequence[Tier],
    policies: Mapping[str, SnapshotPolicy],
    seed: int,
) -> list[dict[str, Any]]:
    """Conversations that a process begins and, once it was killed, another one ends.

    Returns a row a model and policy: ``right`` where all turns have the tokens and the bits of an
    unbroken conversation and the last one began with a load.

    Raises:
      UserError: a process failed.
    """
    job = {
        "models": list(models),
        "tiers": [int(tier) for tier in tiers],
        "policies": {name: dataclasses.asdict(policy) for name, policy in policies.items()},
        "seed": seed,
    }
    before = spawn("talk", job, folder, killed=True)
    after = spawn("resume", job | {"before": before}, folder)
    rows = []
    for model in models:
        for name in policies:
            unbroken, turns = before["unbroken"][model][name], before["turns"][model][name]
            last = after["turns"][model][name]
            rows.append(
                {
                    "model": model,
                    "policy": name,
                    **{key: last[key] for key in ("prompt", "reused", "replayed")},
                    "tokens": len(last["tokens"]),
                    "compiled": after["compiled"][model],
                    "right": [_said(x) for x in (*turns, last)] == [_said(x) for x in unbroken]
                    and last["exact"]
                    and last["reused"] > 0
                    and last["loaded"]
                    and not after["compiled"][model],
                }
            )
    return rows


def _said(turn: Mapping[str, Any]) -> tuple[Any, ...]:
    return turn["tokens"], turn["digest"]


def spawn(
    mode: str, job: Mapping[str, Any], folder: pathlib.Path, *, killed: bool = False
) -> dict[str, Any]:
    """Runs a mode of this script in a new process; its result.

    Raises:
      UserError: it did not end as it should: by SIGKILL where ``killed``, else by itself.
    """
    file, result = folder / f"{mode}.json", folder / f"{mode}.result.json"
    config = {name: getattr(jax.config, name, None) for name in CONFIG}
    file.write_text(json.dumps({**job, "config": config}))
    process = subprocess.run(
        [sys.executable, __file__, mode, str(file), str(result)],
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    if process.returncode != (-signal.SIGKILL if killed else 0) or not result.exists():
        lines = process.stderr.strip().splitlines() or ["it said nothing"]
        raise UserError(f"the new process for {mode} ended with {process.returncode}: {lines[-1]}")
    answer: dict[str, Any] = json.loads(result.read_text())
    return answer


# In the new ones.


def cells(job: Mapping[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """The cells of every model."""
    rows = []
    tiers = [Tier(number) for number in job["tiers"]]
    for model, values in job["models"].items():
        lab = Lab(model, tiers, folder / model, prompts=job["prompts"], seed=0)
        for written in map(Written.from_json, values):
            rows += restored(lab, written)
        lab.runner.close()
    return {"rows": rows}


def restored(lab: Lab, written: Written) -> list[dict[str, Any]]:
    """The cells of one stored prompt, from what the store has of it."""
    rows = []
    stored = lab.find(written.ids, written.namespace, written.policy)
    whole = len(stored.blocks) == written.blocks
    whole &= tuple(stored.snapshots) == written.snapshots
    for fork, cell in written.cells:
        if not whole:
            row = not_there(stored, fork, cell)
        else:
            row = lab.restore(stored, (Tier.DISK,), fork, cell)
        rows.append({"model": lab.model, **row})
    return rows


def talk(job: Mapping[str, Any], folder: pathlib.Path, result: pathlib.Path) -> None:
    """Unbroken conversations, then the same up to their third turns; ends by SIGKILL."""
    answer: dict[str, Any] = {"unbroken": {}, "turns": {}}
    for model in job["models"]:
        engine = make_engine(model, job, folder)
        unbroken = {n: _turns(engine, job, n, "unbroken", TURNS) for n in job["policies"]}
        turns = {n: _turns(engine, job, n, "kept", TURNS - 1) for n in job["policies"]}
        assert engine.runner.mover is not None
        if not engine.runner.mover.flush(timeout_s=PATIENCE_S):
            raise UserError(f"{model} did not store its conversations in {PATIENCE_S:g} s")
        last = [_request(engine, job, n, "kept", turns[n]) for n in job["policies"]]
        handles = [engine.submit(request) for request in last]
        while not all(handle.done or handle.output.pieces for handle in handles):
            engine.step()
        answer["unbroken"][model], answer["turns"][model] = unbroken, turns
    result.write_text(json.dumps(answer))
    kill_process()


def resume(job: Mapping[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """The third turns."""
    answer: dict[str, Any] = {"turns": {}, "compiled": {}}
    for model in job["models"]:
        engine, found = make_engine(model, job, folder), {}
        for name in job["policies"]:
            before, loads = job["before"]["turns"][model][name], engine.counters.restores
            turn = _turn(engine, _request(engine, job, name, "kept", before))
            found[name] = turn | {"loaded": engine.counters.restores > loads}
        answer["turns"][model], answer["compiled"][model] = found, engine.counters.compilations
        engine.close()
    return answer


def make_engine(model: str, job: Mapping[str, Any], folder: pathlib.Path) -> Engine:
    """An engine over the model's store of conversations."""
    count = 64 * (len(job["policies"]) + 1)
    sizes, tiers = PoolSizes(blocks=count, snapshots=count), [Tier(x) for x in job["tiers"]]
    options = TierOptions(
        host=sizes if Tier.HOST in tiers else NOTHING,
        disk=sizes,
        path=folder / f"{model} talks",
    )
    runtime = verify_restore.toy_runtime(model)
    engine = verify_engine.make_engine(
        runtime, count, count, debug=False, tiers=options, cost=LOADS_PAY
    )
    engine.options = dataclasses.replace(engine.options, restore_s=PATIENCE_S)
    return engine


def _turns(
    engine: Engine, job: Mapping[str, Any], policy: str, namespace: str, count: int
) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    runner = engine.runner
    # What idle work publishes has the runner's policy.
    runner.sizes = dataclasses.replace(runner.sizes, policy=_policy(job, policy))
    for _ in range(count):
        turns.append(_turn(engine, _request(engine, job, policy, namespace, turns)))
        engine.drain()
    return turns


def _policy(job: Mapping[str, Any], name: str) -> SnapshotPolicy:
    return SnapshotPolicy(**job["policies"][name])


def _request(
    engine: Engine,
    job: Mapping[str, Any],
    policy: str,
    namespace: str,
    before: Sequence[Mapping[str, Any]],
) -> Request:
    """What is said after these turns."""
    number = list(job["policies"]).index(policy)
    rng = np.random.default_rng((job["seed"], number))
    parts = []
    for turn in (*before, None):
        parts.append(rng.integers(0, engine.runner.model.vocab_size, SAID).astype(np.int32))
        parts += [np.asarray(turn["tokens"], np.int32)] if turn is not None else []
    return Request(
        prompt=np.concatenate(parts),
        max_new_tokens=ANSWERED,
        sampling=SAMPLINGS[number % len(SAMPLINGS)],
        namespace=f"{namespace}, {policy}",
        policy=_policy(job, policy),
    )


def _turn(engine: Engine, request: Request) -> dict[str, Any]:
    output: Output = engine.submit(request).result()
    return {
        "prompt": output.prompt_tokens,
        "tokens": list(map(int, output.tokens)),
        "digest": output.logits_digest,
        "reused": output.reused,
        "replayed": output.replayed,
        "exact": output.exact,
    }


def main() -> int:
    """Runs one job."""
    mode, file, result = sys.argv[1], *map(pathlib.Path, sys.argv[2:4])
    job = json.loads(file.read_text())
    for name, value in job["config"].items():
        if value is not None:
            jax.config.update(name, value)
    if mode == "talk":
        talk(job, file.parent, result)
    found = {"cells": cells, "resume": resume}[mode](job, file.parent)
    result.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    command_line.run(main)
