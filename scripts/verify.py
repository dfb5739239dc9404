"""Proves the library on your own device.

    python scripts/verify.py restore --cells 500
    python scripts/verify.py restore --tiers device,host,disk --policies all
    python scripts/verify.py restore --cache-format release
    python scripts/verify.py poison | knockout | explore
    python scripts/verify.py engine --requests 1000
    python scripts/verify.py crash | faults | handoff
    python scripts/verify.py oracle tests/data/oracle/tiny_a

``restore`` compares digests of logits after a restore with those of a cold run, over random
prompts, every resume position, copied and replayed state, with and without other sequences at work.
With ``--tiers`` it does so for what lies in host memory, on disk, on all of them in parts, and on
disk after a restart, as each of ``--policies`` left it; then conversations go on after a restart.
With ``--cache-format`` the rows are stored as ``models.deepseek_v4.cache_formats`` names it.
``poison`` does so with NaN in every byte that nothing owns. ``knockout`` takes away each kind of
state: the plan must be shorter and blame it, and going on regardless must change the logits.
``explore`` visits every reachable state of the bookkeeping of a small world. ``engine`` runs mixed
requests together, with cancels and preemption in a small pool, and compares digests of all logits
with those of each request alone. ``crash`` kills a process that writes a store at each write point
and looks at what the next one finds. ``faults`` lets every injection point of the tiers fail while
an engine is at work, turns a byte of each file of a store, and gives it folders that are no stores:
all outputs are those of cold runs. ``handoff`` decodes sequences whose prompts another process has
computed. ``oracle DIR`` compares a model's logits with those that another
implementation computed.
"""

import argparse
import pathlib
import sys
import tempfile
import time
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import verify_crash
import verify_engine
import verify_faults
import verify_handoff
import verify_restore
import verify_tiers
from flax import nnx

from hybridkv.arithmetic import cdiv
from hybridkv.blocks.explore import explore
from hybridkv.engine.steps import Steps, prompt_tiles
from hybridkv.errors import UserError
from hybridkv.state.batch import DecodeBatch, StepOptions
from hybridkv.state.cache import Cache, assign_in_order
from hybridkv.state.capacity import Capacity
from models.deepseek_v4.cache_formats import CACHE_FORMATS
from models.deepseek_v4.checkpoint import load_model
from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.parallel import parallel_forward
from models.deepseek_v4.runtime import DeepseekV4Runtime

TOLERANCE = 1e-4
"""Two right float32 implementations differ by about 3e-5 where logits have a deviation of 2."""
MODELS = ["deepseek_v4", "llama"]
ARRAYS = (
    "input_ids",
    "prefill_logits",
    "greedy_tokens",
    "decode_logits",
    "full_ids",
    "full_logits",
)


def load_oracle(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of ``oracle.npz``.

    Raises:
      UserError: the file is missing, or arrays in it are.
    """
    file = folder / "oracle.npz"
    if not file.is_file():
        raise UserError(f"no oracle.npz in {folder}: pass a folder with model and oracle")
    with np.load(file) as arrays:
        missing = [name for name in ARRAYS if name not in arrays]
        if missing:
            raise UserError(f"{file} lacks the array {missing[0]!r}")
        return {name: arrays[name] for name in ARRAYS}


def whole_sequence(model: DeepseekV4, ids: np.ndarray) -> np.ndarray:
    """Logits ``[tokens, vocab]`` without any cache."""
    graph, state = nnx.split(model)

    @jax.jit
    def forward(state: Any, tokens: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return parallel_forward(nnx.merge(graph, state), tokens)[0][0]

    return np.asarray(forward(state, jnp.asarray(ids[None])))


class OracleRun:
    """One tile size: prefill tile by tile, decode from the cache."""

    def __init__(self, runtime: DeepseekV4Runtime, tile: int, tokens: int) -> None:
        cpu = jax.default_backend() == "cpu"
        self.options = StepOptions(tile=tile, sequential=cpu, all_logits=True)
        self.steps = Steps(runtime, self.options)
        self.capacity = Capacity.for_tokens(runtime.geometry, tokens=tokens)
        self.geometry = runtime.geometry

    def _empty(self) -> Cache:
        return assign_in_order(Cache.init(self.geometry, self.capacity))

    def prefill(self, ids: np.ndarray) -> tuple[np.ndarray, Cache]:
        """Logits of every position, and the cache after the last."""
        cache, parts = self._empty(), []
        for batch in prompt_tiles(ids, 0, self.options, slots=1):
            logits, cache = self.steps.tile(batch, cache)
            parts.append(np.asarray(logits[0]))
        return np.concatenate(parts)[: len(ids)], cache

    def decode(self, prompt: np.ndarray, given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits after each of ``given``, and the likeliest token before each of them."""
        logits, cache = self.prefill(prompt)
        out, likeliest = [], [int(logits[-1].argmax())]
        for token in given:
            batch = DecodeBatch(tokens=jnp.asarray([token], jnp.int32), active=jnp.ones(1, bool))
            row, cache = self.steps.decode(batch, cache)
            out.append(np.asarray(row[0]))
            likeliest.append(int(out[-1].argmax()))
        return np.stack(out), np.asarray(likeliest[:-1])


def tile_sizes(block: int, tokens: int) -> list[int]:
    """One block, some blocks, and the whole sequence in one tile."""
    return sorted({block, 2 * block, 4 * block, 8 * block, cdiv(tokens, block) * block})


def oracle(args: argparse.Namespace) -> int:
    """The ``oracle`` subcommand: 0 when everything is within tolerance, else 1."""
    folder = args.folder
    arrays = load_oracle(folder)
    model = load_model(folder)
    runtime = DeepseekV4Runtime(model)
    prompt = arrays["input_ids"][0].astype(np.int32)
    full = arrays["full_ids"][0].astype(np.int32)
    greedy = arrays["greedy_tokens"].astype(np.int32)
    rows: list[dict[str, Any]] = []

    def compare(what: str, tile: int | None, ours: np.ndarray, theirs: np.ndarray) -> None:
        difference = float(np.abs(ours - theirs).max())
        rows.append({"what": what, "tile": tile, "max_abs": difference})

    whole = whole_sequence(model, full)
    compare(
        "prefill, whole sequence, no cache", None, whole[: len(prompt)], arrays["prefill_logits"]
    )
    compare("whole sequence, no cache", None, whole, arrays["full_logits"])
    for tile in args.tile or tile_sizes(runtime.geometry.block_tokens, len(full)):
        run = OracleRun(runtime, tile, len(full))
        compare("prefill, tile by tile", tile, run.prefill(prompt)[0], arrays["prefill_logits"])
        compare("all tokens, tile by tile", tile, run.prefill(full)[0], arrays["full_logits"])
        logits, likeliest = run.decode(prompt, greedy)
        compare("decode from the cache", tile, logits, arrays["decode_logits"])
        rows[-1]["greedy_equal"] = int((likeliest == greedy).sum())
        rows[-1]["greedy_total"] = len(greedy)
    for row in rows:
        same = row.get("greedy_equal") == row.get("greedy_total")
        row["ok"] = bool(row["max_abs"] <= TOLERANCE and same)
    return _report_oracle(args, folder, rows)


def _report_oracle(
    args: argparse.Namespace, folder: pathlib.Path, rows: list[dict[str, Any]]
) -> int:
    command_line.print_table(
        f"{folder.name} on {command_line.device_name()}, tolerance {TOLERANCE:g}",
        ["what", "tile", "max abs", "greedy tokens equal", "ok"],
        [
            (
                row["what"],
                row["tile"] or "-",
                f"{row['max_abs']:.2e}",
                f"{row['greedy_equal']} of {row['greedy_total']}" if "greedy_total" in row else "-",
                "yes" if row["ok"] else "NO",
            )
            for row in rows
        ],
    )
    ok = all(row["ok"] for row in rows)
    result = {"ok": ok, "tolerance": TOLERANCE, "device": command_line.device_name(), "rows": rows}
    command_line.write_json(args.json, result)
    return 0 if ok else 1


def models_of(args: argparse.Namespace) -> list[str]:
    """The models to check, as ``verify_restore.toy_runtime`` names them.

    Raises:
      UserError: a cache format for a model that has no choice of them.
    """
    if args.cache_format is None:
        return args.model or MODELS
    if args.model not in (None, ["deepseek_v4"]):
        raise UserError("--cache-format is for deepseek_v4: leave out --model llama")
    return [f"deepseek_v4-{args.cache_format}"]


def restore_cells(args: argparse.Namespace) -> int:
    """The ``restore`` and ``poison`` subcommands."""
    models = models_of(args)
    if args.command == "restore" and (args.tiers is not None or args.policies is not None):
        return restore_tiers(args, models)
    check = {"restore": verify_restore.restore, "poison": verify_restore.poison}[args.command]
    cells = args.cells or {"restore": 500, "poison": 200}[args.command]
    results = {model: check(model, cells // len(models), args.seed) for model in models}
    ok = verify_restore.report_cells(
        f"{args.command} on {command_line.device_name()}: digests of logits against cold runs",
        results,
    )
    return _finish(args, ok, {"cells": results})


def restore_tiers(args: argparse.Namespace, models: list[str]) -> int:
    """``restore`` with ``--tiers``."""
    if args.tiers is None:
        raise UserError("--policies is for tiers: add --tiers device,host,disk")
    tiers = verify_tiers.tiers_of(args.tiers)
    policies = verify_tiers.policies_of("all" if args.policies is None else args.policies)
    ok, result = verify_tiers.run(
        models, tiers, policies, cells=args.cells or verify_tiers.CELLS, seed=args.seed
    )
    return _finish(args, ok, result)


def knockout(args: argparse.Namespace) -> int:
    """The ``knockout`` subcommand."""
    rows = verify_restore.knockout(args.seed, args.repeats)
    command_line.print_table(
        f"knockout on {command_line.device_name()}, {args.repeats} prompts a part",
        ["part", "kind", "plan shorter", "kind blamed", "equal to cold", "unguarded: changed"],
        [
            (
                row["part"],
                row["kind"],
                *("yes" if row[key] else "NO" for key in ("shorter", "blamed", "equal")),
                f"{row['changed_unguarded']} of {row['repeats']}",
            )
            for row in rows
        ],
    )
    ok = all(
        row["shorter"] and row["blamed"] and row["equal"] and row["changed_unguarded"]
        for row in rows
    )
    return _finish(args, ok, {"rows": rows})


def explore_world(args: argparse.Namespace) -> int:
    """The ``explore`` subcommand."""
    began = time.perf_counter()
    found = explore()
    seconds = time.perf_counter() - began
    command_line.print_table(
        "every reachable state of 2 blocks, 1 snapshot, 2 requests and 3 tiers, all invariants "
        "checked after each event",
        ["states", "transitions", "events refused", "seconds"],
        [(found.states, found.transitions, found.refused, f"{seconds:.1f}")],
    )
    result = {"states": found.states, "transitions": found.transitions, "refused": found.refused}
    return _finish(args, True, result)


def engine(args: argparse.Namespace) -> int:
    """The ``engine`` subcommand."""
    models = args.model or MODELS
    each = cdiv(args.requests, len(models))
    results = {model: verify_engine.verify(model, each, args.seed) for model in models}
    command_line.print_table(
        f"engine on {command_line.device_name()}: requests together against each alone",
        ["requests", "outputs", "ended early", "mismatches"],
        [
            (f"{model}, {sort}", row["outputs"], row["ended early"], row["mismatches"])
            for model, result in results.items()
            for sort, row in result["rows"].items()
        ],
    )
    command_line.print_table(
        f"{verify_engine.SLOTS} slots, a pool of {verify_engine.SHARE} times their mean demand",
        ["model", "mismatches", "compilations", "preempted", "followed", "reused", "at rest"],
        [
            (
                model,
                result["mismatches"],
                result["compilations"],
                result["counters"]["preemptions"],
                result["counters"]["followed"],
                result["counters"]["reused_tokens"],
                "yes" if result["at rest"] else "NO",
            )
            for model, result in results.items()
        ],
    )
    return _finish(args, all(r["ok"] for r in results.values()), {"models": results})


def crash(args: argparse.Namespace) -> int:
    """The ``crash`` subcommand."""
    with tempfile.TemporaryDirectory() as folder:
        ok, result = verify_crash.verify(pathlib.Path(folder), budget_s=args.budget, seed=args.seed)
    return _finish(args, ok, result)


def faults(args: argparse.Namespace) -> int:
    """The ``faults`` subcommand."""
    with tempfile.TemporaryDirectory() as folder:
        ok, result = verify_faults.verify(
            pathlib.Path(folder), budget_s=args.budget, seed=args.seed
        )
    return _finish(args, ok, result)


def handoff(args: argparse.Namespace) -> int:
    """The ``handoff`` subcommand."""
    models = args.model or MODELS
    results = {
        m: verify_handoff.verify(m, cdiv(args.cases, len(models)), args.seed) for m in models
    }
    columns = [name for name in next(iter(results.values())) if name != "ok"]
    command_line.print_table(
        f"hand-off on {command_line.device_name()}: decoded in another process than the prompt",
        ["model", *columns],
        [(model, *(result[name] for name in columns)) for model, result in results.items()],
    )
    return _finish(args, all(r["ok"] for r in results.values()), {"models": results})


def _finish(args: argparse.Namespace, ok: bool, result: dict[str, Any]) -> int:
    command_line.write_json(args.json, {"ok": ok, "device": command_line.device_name(), **result})
    return 0 if ok else 1


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", action="append", choices=MODELS, help="only these")


def _add_oracle(commands: Any) -> None:
    parser = commands.add_parser("oracle", help="compare logits with another implementation")
    parser.add_argument("folder", type=pathlib.Path, help="model and oracle.npz")
    parser.add_argument("--tile", type=int, action="append", help="only these tile sizes")
    parser.set_defaults(run=oracle)


def _add_cells(commands: Any) -> None:
    for name, what in (
        ("restore", "restored against cold runs, bit for bit"),
        ("poison", "the same with NaN in every unused byte"),
    ):
        parser = commands.add_parser(name, help=what)
        parser.add_argument("--cells", type=_positive, help="about so many")
        _add_models(parser)
        parser.add_argument(
            "--cache-format",
            choices=list(CACHE_FORMATS),
            help="deepseek_v4 alone, stored like this",
        )
        parser.set_defaults(run=restore_cells)
    tiered = commands.choices["restore"]
    tiered.add_argument("--tiers", metavar="LIST", help="some of device,host,disk")
    tiered.add_argument("--policies", metavar="LIST", help="all, or some of prefixes.policy's")


def _add_small(commands: Any) -> None:
    parts = commands.add_parser("knockout", help="each kind of state removed")
    parts.add_argument("--repeats", type=_positive, default=4, help="prompts a part")
    parts.set_defaults(run=knockout)
    world = commands.add_parser("explore", help="all states of a small world")
    world.set_defaults(run=explore_world)


def _add_engines(commands: Any) -> None:
    together = commands.add_parser("engine", help="requests together against each alone")
    together.add_argument("--requests", type=_positive, default=1000, help="of all models")
    _add_models(together)
    together.set_defaults(run=engine)
    for name, budget, run, what in (
        ("crash", verify_crash.BUDGET_S, crash, "a writer killed at each write point"),
        ("faults", verify_faults.BUDGET_S, faults, "every injection point fails"),
    ):
        breaking = commands.add_parser(name, help=what)
        breaking.add_argument(
            "--budget", type=_positive, default=budget, metavar="SECONDS", help="for all, about"
        )
        breaking.set_defaults(run=run)
    moved = commands.add_parser("handoff", help="sequences that change the process")
    moved.add_argument("--cases", type=_positive, default=80, help="about so many")
    _add_models(moved)
    moved.set_defaults(run=handoff)


def main() -> int:
    """Dispatches to the subcommand."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_add_oracle, _add_cells, _add_small, _add_engines):
        add(commands)
    for name, command in commands.choices.items():
        if name != "oracle":  # nothing is drawn
            command.add_argument("--seed", type=int, default=0)
        command.add_argument("--json", metavar="FILE", help="write the result here too")
    args = parser.parse_args(sys.argv[1:])
    command_line.use_compilation_cache()
    return args.run(args)


if __name__ == "__main__":
    command_line.run(main)
