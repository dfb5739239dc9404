"""Seeds faults one at a time and shows which test catches each.

    python scripts/mutants.py            # or: make mutants

A copy of the repository is changed, never the repository itself. A fault that no listed test
catches is a hole in the suite: the run fails.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import command_line
from mutant import Mutant
from mutants_engine import ENGINE_MUTANTS
from mutants_tiers import TIER_MUTANTS

from hybridkv.errors import UserError

ROOT = pathlib.Path(__file__).parent.parent
TIMEOUT_SECONDS = 300
"""Of one fault; all tests without any may take ``CLEAN_SECONDS``."""
CLEAN_SECONDS = 1200
BROKEN = 124
"""Stands for an exit status that neither catches nor passes."""
TILE = "models/deepseek_v4/tile.py"
SNAPSHOT = "hybridkv/state/snapshot.py"
PLAN = "hybridkv/prefixes/plan.py"
CHECKS = "hybridkv/prefixes/checks.py"
DIRECTORY = "hybridkv/prefixes/directory.py"
ALLOCATOR = "hybridkv/blocks/allocator.py"
EVICTION = "hybridkv/blocks/eviction.py"
RUNNER = "hybridkv/engine/runner.py"
HOLDS = "hybridkv/engine/holds.py"
T_RESTORE = "tests/models/deepseek_v4/test_restore.py"
T_REPLAY = "tests/models/deepseek_v4/test_replay_start.py"
T_RUNNER = "tests/hybridkv/engine/test_runner.py"
T_HOLDS = "tests/hybridkv/engine/test_runner_holds.py"
T_PLAN = "tests/hybridkv/prefixes/test_plan.py"
T_CHECKS = "tests/hybridkv/prefixes/test_checks.py"
T_DIRECTORY = "tests/hybridkv/prefixes/test_directory.py"
T_IDENTITY = "tests/hybridkv/prefixes/test_identity.py"
T_LEASES = "tests/hybridkv/blocks/test_leases.py"
T_ALLOCATOR = "tests/hybridkv/blocks/test_allocator.py"
T_EVICTION = "tests/hybridkv/blocks/test_eviction.py"
T_SNAPSHOT = "tests/hybridkv/state/test_snapshot.py"
T_POLICY = "tests/hybridkv/prefixes/test_policy.py"


MUTANTS = (
    Mutant(
        "one cell too many is written in a replay",
        TILE,
        "(end > lanes.write_from[:, None])",
        "(end >= lanes.write_from[:, None])",
        (f"{T_REPLAY}::test_a_cell_that_ends_at_write_from_keeps_bytes_that_no_step_would_make",),
    ),
    Mutant(
        "stored rows are written again",
        TILE,
        " & (end > lanes.write_from[:, None])",
        "",
        (f"{T_REPLAY}::test_a_cell_that_ends_at_write_from_keeps_bytes_that_no_step_would_make",),
    ),
    Mutant(
        "a replay keeps window rows it does not know",
        TILE,
        "ring.shape[1] - 1, lanes.known_from)",
        "ring.shape[1] - 1)",
        (T_REPLAY,),
    ),
    Mutant(
        "attention sees window rows from before a replay",
        TILE,
        "lanes.starts - lanes.known_from,",
        "lanes.starts,",
        (T_REPLAY,),
    ),
    Mutant(
        "a replay pools an overlap it does not know",
        TILE,
        "pool_after(cells, tail, lanes.starts > lanes.known_from, kernels=kernels)",
        "pool_after(cells, tail, lanes.starts > 0, kernels=kernels)",
        (T_REPLAY,),
    ),
    Mutant(
        "a snapshot leaves the index overlap behind",
        SNAPSHOT,
        "index=tuple(map(tail, state.tails.index, snapshots.index)),",
        "index=state.tails.index,",
        (T_SNAPSHOT,),
    ),
    Mutant(
        "a snapshot leaves the overlap behind",
        SNAPSHOT,
        "main=tuple(map(tail, state.tails.main, snapshots.main)),",
        "main=state.tails.main,",
        (T_SNAPSHOT,),
    ),
    Mutant(
        "a snapshot leaves the window behind",
        SNAPSHOT,
        "window = jax.tree.map(copy, state.window, snapshots.window)",
        "window = state.window",
        (T_SNAPSHOT,),
    ),
    Mutant(
        "the cone of a replay is too short",
        "hybridkv/prefixes/needs.py",
        "position - geometry.replay_tokens(position)",
        "position - geometry.replay_tokens(position) // 2",
        (f"{T_RESTORE}::test_a_replayed_state_continues_with_the_same_bits",),
    ),
    Mutant(
        "the replay formula forgets the layer's own need",
        "hybridkv/geometry.py",
        "longest = max(longest, reach + self._rebuilt_tokens(layer, position))",
        "longest = max(longest, reach)",
        ("tests/hybridkv/test_geometry.py",),
    ),
    Mutant(
        "all tokens of a prompt may be reused",
        CHECKS,
        "round_down(max(tokens - 1, 0), tile)",
        "round_down(tokens, tile)",
        (T_CHECKS, T_PLAN),
    ),
    Mutant(
        "a kind of the blocks is not asked for",
        CHECKS,
        "for holds in conditions.blocks.values():",
        "for holds in list(conditions.blocks.values())[:1]:",
        (T_CHECKS, T_PLAN),
    ),
    Mutant(
        "a kind of the snapshot is not asked for",
        CHECKS,
        "for holds in conditions.snapshots.values():",
        "for holds in list(conditions.snapshots.values())[:1]:",
        (T_CHECKS, T_PLAN),
    ),
    Mutant(
        "the last token's position is rounded instead of searched",
        CHECKS,
        "shared=_last(conditions.positions, whole), snapshot=_last(conditions.positions, copied)",
        "shared=_last(conditions.positions, whole), snapshot=_last(conditions.positions, whole)",
        (T_CHECKS, T_PLAN),
    ),
    Mutant(
        "tokens are not compared on a hit",
        DIRECTORY,
        "same = there & ((differ[:, 0] | differ[:, 1]) == 0)",
        "same = there",
        (T_DIRECTORY,),
    ),
    Mutant(
        "the block before is not compared on a hit",
        DIRECTORY,
        'right = same & (self.entries.parent.take(ids, mode="clip") == before)',
        "right = same",
        (T_DIRECTORY,),
    ),
    Mutant(
        "what is evicted stays in the directory",
        DIRECTORY,
        "                self._table.remove(of_form)",
        "                pass",
        (T_DIRECTORY,),
    ),
    Mutant(
        "namespaces share a root",
        "hybridkv/prefixes/identity.py",
        '(_ROOT_DOMAIN, "namespace", "", namespace)',
        '(_ROOT_DOMAIN, "namespace", "", "")',
        (T_IDENTITY,),
    ),
    Mutant(
        "parts of an identity run together",
        "hybridkv/prefixes/identity.py",
        'return len(field).to_bytes(8, "little") + field',
        "return field",
        (T_IDENTITY,),
    ),
    Mutant(
        "blocks are published before they are computed",
        "hybridkv/engine/publisher.py",
        "computed = min(sequence.computed, sequence.prompt_tokens)",
        "computed = sequence.prompt_tokens",
        (f"{T_RUNNER}::test_a_sequence_ended_half_way_leaves_its_whole_blocks",),
    ),
    Mutant(
        "a snapshot is written inside the cone of a replay",
        "hybridkv/prefixes/policy.py",
        "if p > start and p >= exact_from",
        "if p > start",
        (T_POLICY,),
    ),
    Mutant(
        "no snapshot where prompts part",
        "hybridkv/prefixes/policy.py",
        "known.add(round_down(shared, tile))",
        "pass",
        (T_POLICY,),
    ),
    Mutant(
        "the block table holds entries instead of places",
        RUNNER,
        "table[: len(entries)] = self.allocator.entries.place[Tier.DEVICE][entries]",
        "table[: len(entries)] = entries",
        (f"{T_HOLDS}::test_a_block_table_holds_places_of_the_pool_and_not_numbers_of_entries",),
    ),
    Mutant(
        "a replay counts old window rows as known",
        PLAN,
        "return self.start if self.snapshot < 0 and Action.REPLAY in self.needs.values() else 0",
        "return 0",
        (T_PLAN,),
    ),
    Mutant(
        "a stale entry is leased",
        ALLOCATOR,
        "if (expected != current).any():",
        "if False:",
        (T_LEASES,),
    ),
    Mutant(
        "a receipt can be given back twice",
        "hybridkv/blocks/leases.py",
        '            raise DoubleRelease(f"receipt {receipt.serial} was given back before")',
        "            return",
        (T_LEASES,),
    ),
    Mutant(
        "what is leased is evicted",
        EVICTION,
        "    idle &= entries.leases == 0\n",
        "",
        (T_EVICTION,),
    ),
    Mutant(
        "a generation is not counted up",
        ALLOCATOR,
        "        entries.generation[ids] += 1\n",
        "",
        (T_ALLOCATOR, T_LEASES),
    ),
    Mutant(
        "promised places are given away again",
        "hybridkv/blocks/pools.py",
        "return len(self.places) - self.reserved",
        "return len(self.places)",
        ("tests/hybridkv/blocks/test_pools.py", T_ALLOCATOR),
    ),
    Mutant(
        "a lost token is blamed twice",
        "hybridkv/prefixes/losses.py",
        "        above = position\n",
        "",
        ("tests/hybridkv/prefixes/test_losses.py", T_PLAN),
    ),
    Mutant(
        "a refused attempt leaves its lease behind",
        HOLDS,
        "            if receipt is not None:\n                allocator.release(receipt)",
        "            pass",
        (f"{T_RUNNER}::test_too_little_room_now_is_told_from_a_prompt_that_never_fits",),
    ),
    Mutant(
        "a snapshot is taken of another slot",
        SNAPSHOT,
        "pool.at[place].set(rows[slot], mode=",
        "pool.at[place].set(rows[0], mode=",
        (T_SNAPSHOT,),
    ),
    Mutant(
        "a snapshot is read from the place beside it",
        SNAPSHOT,
        "pool.at[place].get(",
        "pool.at[place - 1].get(",
        (T_SNAPSHOT,),
    ),
    Mutant(
        "a snapshot's entry is taken for its place",
        RUNNER,
        "place = int(self.allocator.entries.place[Tier.DEVICE][plan.snapshot])",
        "place = int(plan.snapshot)",
        (f"{T_RUNNER}::test_an_exact_repetition_reuses_all_but_the_last_tile",),
    ),
    Mutant(
        "a plan's snapshot is not leased while room is made",
        HOLDS,
        "snapshot = _lease_snapshot(allocator, plan)",
        "snapshot = None",
        (f"{T_HOLDS}::test_blocks_and_snapshot_of_a_plan_are_leased_while_room_is_made",),
    ),
    Mutant(
        "logits inside a replay pass for exact ones",
        PLAN,
        "return self.shared if self.known_from else self.start",
        "return self.start",
        (f"{T_RUNNER}::test_no_snapshot_is_written_inside_the_cone_of_a_replay",),
    ),
    Mutant(
        "another identity's bytes are read",
        PLAN,
        "    if foreign:",
        "    if False:",
        (T_PLAN,),
    ),
    Mutant(
        "overlaps are not asked for",
        "hybridkv/prefixes/needs.py",
        "kinds.append(Kind.TAIL)",
        "pass",
        (T_PLAN,),
    ),
    Mutant(
        "weights are no part of an identity",
        "hybridkv/prefixes/identity.py",
        '("geometry", "weights", "layout", "numerics"):',
        '("geometry", "layout", "numerics"):',
        (T_IDENTITY,),
    ),
    Mutant(
        "nobody remembers what was evicted",
        DIRECTORY,
        "            self._ghosts[form].note(self.entries.digest[of_form], cause)\n",
        "",
        (T_PLAN,),
    ),
    Mutant(
        "a parent is evicted before its child",
        EVICTION,
        "leaves = ids[standing[ids] == 0]",
        "leaves = ids",
        (T_EVICTION,),
    ),
    Mutant(
        "what leads to a leased block is evicted",
        EVICTION,
        "    _keep_with_ancestors(entries, can_go, kept[kept != NONE])\n",
        "",
        (T_EVICTION,),
    ),
    Mutant(
        "a lease is not counted",
        ALLOCATOR,
        "        columns.leases[ids] += 1\n        receipt = self.leases.issue(ids, current)",
        "        receipt = self.leases.issue(ids, current)",
        (T_LEASES,),
    ),
    Mutant(
        "a cancelled reservation keeps its places",
        ALLOCATOR,
        "self.pools[reservation.tier][form].reserved -= count",
        "pass",
        (T_ALLOCATOR,),
    ),
    Mutant(
        "the window is read one row too early",
        "hybridkv/state/window.py",
        "jnp.arange(-count, 0, dtype=jnp.int32)",
        "jnp.arange(-count - 1, -1, dtype=jnp.int32)",
        ("tests/hybridkv/state/test_window.py",),
    ),
    Mutant(
        "the overlap is that of the cell before the last",
        "hybridkv/state/tail.py",
        "at = (done[:, None] - 1) * ratio",
        "at = (done[:, None] - 2) * ratio",
        ("tests/hybridkv/state/test_tail.py",),
    ),
    *ENGINE_MUTANTS,
    *TIER_MUTANTS,
)


def copy_of_repository(folder: pathlib.Path) -> None:
    """Tracked files, and untracked ones that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run_tests(
    folder: pathlib.Path,
    cache: pathlib.Path,
    tests: tuple[str, ...],
    seconds: int = TIMEOUT_SECONDS,
) -> tuple[int, str]:
    """Exit status of pytest, and the first failing test or the last line it printed.

    What a fault leaves as it is was compiled by an earlier run and is read from ``cache``.
    """
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return BROKEN, f"more than {seconds} s"
    failed = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
    if done.returncode == 1 and not failed:
        return BROKEN, lines[-1]  # a fixture, say: no test has judged
    return done.returncode, failed[1] if failed else lines[-1]


def seeded(mutant: Mutant, text: str) -> str:
    """The file's text with the fault.

    Raises:
      UserError: the text to replace does not stand there exactly once.
    """
    count = text.count(mutant.old)
    if count != 1:
        raise UserError(
            f"{mutant.file} has the text of mutant {mutant.name!r} {count} times, not once: "
            "the source moved on, so adapt scripts/mutants.py"
        )
    return text.replace(mutant.old, mutant.new)


def judge(mutant: Mutant, folder: pathlib.Path) -> dict[str, Any]:
    """Runs the mutant's tests in a copy of its own."""
    own = pathlib.Path(tempfile.mkdtemp(dir=folder))
    shutil.copytree(folder / "clean", own / "tree", symlinks=True)
    file = own / "tree" / mutant.file
    file.write_text(seeded(mutant, file.read_text()))
    began = time.perf_counter()
    status, what = run_tests(own / "tree", folder / "xla", mutant.tests)
    shutil.rmtree(own)
    verdict = {0: "survived", 1: "caught"}.get(status, "broken")
    return {
        "mutant": mutant.name,
        "verdict": verdict,
        "by": what,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> int:
    """0 when every mutant is caught."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TEXT", help="mutants whose name contains it")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    args = parser.parse_args(sys.argv[1:])
    chosen = [m for m in MUTANTS if (args.only or "") in m.name]
    if not chosen:
        raise UserError(f"no mutant's name contains {args.only!r}: see --list")
    if args.list:
        print("\n".join(m.name for m in chosen))
        return 0
    for mutant in chosen:
        seeded(mutant, (ROOT / mutant.file).read_text())
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        copy_of_repository(folder / "clean")
        tests = tuple(sorted({test for mutant in chosen for test in mutant.tests}))
        status, what = run_tests(folder / "clean", folder / "xla", tests, CLEAN_SECONDS)
        if status:
            raise UserError(f"the tests fail without any mutant ({what}): mend them first")
        with ThreadPoolExecutor(args.jobs) as pool:
            rows = list(pool.map(lambda mutant: judge(mutant, folder), chosen))
    command_line.print_table(
        f"{len(rows)} seeded faults",
        ["fault", "verdict", "by", "seconds"],
        [
            (row["mutant"], row["verdict"], row["by"].rpartition("::")[2], row["seconds"])
            for row in rows
        ],
    )
    ok = all(row["verdict"] == "caught" for row in rows)
    command_line.write_json(args.json, {"ok": ok, "mutants": rows})
    return 0 if ok else 1


if __name__ == "__main__":
    command_line.run(main)
