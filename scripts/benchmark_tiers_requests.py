r"""Requests whose prefixes come from host memory or disk, in an engine.

    first token    cold, from device, from host, from disk; from disk after a restart
    decoding       turns of a full batch, alone and while another prefix is loaded all the time

An engine that is closed and one that is made on its folder stand for a restart, with the page cache
dropped. Sides take turns; medians count.
"""

import argparse
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from benchmark_tiers_moves import TIMEOUT_S, data_files, drop_caches, evict, finish

from hybridkv.arithmetic import cdiv
from hybridkv.blocks.entries import Tier
from hybridkv.blocks.pools import PoolSizes
from hybridkv.engine.engine import Engine
from hybridkv.engine.handle import Handle
from hybridkv.engine.requests import Request
from hybridkv.engine.runner import Runner, RunnerOptions
from hybridkv.engine.sequence import Hold
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.state.batch import StepOptions
from hybridkv.state.capacity import Capacity
from hybridkv.tiers.mover import Mover, Ticket
from hybridkv.tiers.options import TierOptions
from hybridkv.tiers.tickets import RestoreState
from models.deepseek_v4.runtime import DeepseekV4Runtime

CONTEXT = 500
"""Tokens of a prompt that decodes."""
SPARE = 8


class Lab:
    """One engine with all tiers; ``restart`` closes it and makes another on its folder."""

    def __init__(
        self, runtime: DeepseekV4Runtime, path: pathlib.Path, args: argparse.Namespace
    ) -> None:
        self.args, self.path, self._runtime = args, path, runtime
        self.rng = np.random.default_rng(args.seed)
        self._options = StepOptions(tile=args.tile, sequential=jax.default_backend() == "cpu")
        block = runtime.geometry.block_tokens
        longest = cdiv(max(args.tokens, args.policy_tokens, *args.positions) + args.tile, block) + 4
        decoding = cdiv(CONTEXT + self.starting + self.turns, block) + 1
        capacity = Capacity(
            blocks=3 * longest + args.slots * decoding,
            slots=args.slots,
            blocks_per_sequence=longest,
        )
        kept = (2 * args.rounds + 4 * len(args.positions) + 12) * longest
        self._sizes = RunnerOptions(
            capacity=capacity,
            snapshots=2 * longest,
            tiers=TierOptions(
                host=PoolSizes(blocks=kept, snapshots=4 * longest),
                disk=PoolSizes(blocks=2 * kept, snapshots=16 * longest),
                path=path,
            ),
        )
        self._compilations = 0
        self.engine = self._open()

    @property
    def starting(self) -> int:
        """Turns until all streams decode, at most."""
        return self.args.slots * cdiv(CONTEXT, self.args.tile) + SPARE

    @property
    def turns(self) -> int:
        """Turns of a stream that are measured."""
        return self.args.turns * self.args.windows * len(WINDOWS) + SPARE

    @property
    def runner(self) -> Runner:
        """The engine's."""
        return self.engine.runner

    @property
    def mover(self) -> Mover:
        """The engine's."""
        assert self.runner.mover is not None
        return self.runner.mover

    @property
    def compilations(self) -> int:
        """After warm-up, of all engines."""
        self.engine.step()
        return self._compilations + self.engine.counters.compilations

    def _open(self) -> Engine:
        return Engine(self._runtime, self._options, self._sizes)

    def restart(self) -> float:
        """Seconds that opening takes."""
        self._compilations = self.compilations
        self.close()
        began = time.perf_counter()
        self.engine = self._open()
        return time.perf_counter() - began

    def close(self) -> None:
        """Ends the engine."""
        if not self.engine.close(timeout_s=TIMEOUT_S):
            raise RuntimeError("an engine closed without having stored everything")

    def ids(self, length: int) -> np.ndarray:
        """Random tokens."""
        return self.rng.integers(0, self._runtime.vocab_size, length).astype(np.int32)

    def only_on(self, tier: Tier) -> None:
        """Stores all that waits, and makes every faster tier give up what it has."""
        finish(self.mover)
        for faster in (Tier.DEVICE, Tier.HOST):
            if faster < tier:
                evict(self.runner.allocator, faster)

    def drop_caches(self) -> bool:
        """Makes the operating system forget the store."""
        return drop_caches(data_files(self.path))

    def first_token(self, prompt: np.ndarray) -> tuple[float, int]:
        """Seconds from submission to the first token, and the tokens that were reused."""
        began = time.perf_counter()
        handle = self.engine.submit(Request(prompt=prompt, max_new_tokens=1))
        while not handle.output.pieces and not handle.done:
            self.engine.step()
        seconds = time.perf_counter() - began
        reused = handle.output.reused
        self.engine.drain()
        return seconds, reused


def measure_first_token(lab: Lab) -> dict[str, Any]:
    """A prompt a round, from everywhere; then all of them again after a restart."""
    args = lab.args
    prompts = [lab.ids(args.tokens) for _ in range(args.rounds)]
    seconds: dict[str, list[float]] = {}
    reused: dict[str, int] = {}

    def note(side: str, prompt: np.ndarray) -> None:
        took, reused[side] = lab.first_token(prompt)
        seconds.setdefault(side, []).append(took)

    for prompt in prompts:
        note("cold", prompt)
        finish(lab.mover)
        note("device", prompt)
        lab.only_on(Tier.HOST)
        note("host", prompt)
        lab.only_on(Tier.DISK)
        lab.drop_caches()
        note("disk", prompt)
        lab.only_on(Tier.DISK)
    opened = lab.restart()
    for prompt in prompts:
        lab.drop_caches()
        note("disk, restarted", prompt)
    cold = float(np.median(seconds["cold"]))
    return {
        "tokens": args.tokens,
        "rounds": args.rounds,
        "opening_seconds": opened,
        "sides": {
            side: {
                "seconds": float(np.median(values)),
                "all": values,
                "share_of_cold": float(np.median(values)) / cold,
                "reused": reused[side],
            }
            for side, values in seconds.items()
        },
    }


WINDOWS: dict[str, Tier | None] = {"alone": None, "host": Tier.HOST, "disk": Tier.DISK}
"""By what is loaded meanwhile."""


class Loader:
    """Somebody who has one prefix brought to the device, again and again."""

    def __init__(self, lab: Lab, chain: TokenChain, tier: Tier) -> None:
        self._lab, self._chain, self._tier = lab, chain, tier
        self._hold: Hold | None = None
        self._ticket: Ticket | None = None
        self.ended = 0
        """Loads that came to their end."""

    def begin(self) -> None:
        """As an engine does when it admits a request; nothing while one is under way."""
        if self._hold is not None:
            return
        runner = self._lab.runner
        self._hold = runner.hold(self._chain, tokens=self._chain.length + 1, loads=True)
        self._ticket = self._lab.mover.begin(self._hold)
        if self._ticket is None:
            raise RuntimeError("a prefix that was to be loaded is on the device already")

    def again(self) -> None:
        """Where a load has ended: evicts what it brought, so that the next one can begin."""
        if self._ticket is not None and self._ticket.state() is not RestoreState.PENDING:
            self.ended += self._ticket.state() is RestoreState.READY
            self.stop()

    def prepare(self) -> None:
        """Puts the prefix on its tier and no faster one: a copy on the host may have gone."""
        mover = self._lab.mover
        self.begin()
        while self._ticket is not None and self._ticket.state() is RestoreState.PENDING:
            mover.turn()
        self._give_back()
        mover.published(self._chain)
        self._lab.only_on(self._tier)

    def stop(self) -> None:
        """Gives up what is under way."""
        self._give_back()
        for tier in (Tier.DEVICE, Tier.HOST):
            if tier < self._tier:
                evict(self._lab.runner.allocator, tier)

    def _give_back(self) -> None:
        if self._ticket is not None:
            self._ticket.cancel()
        if self._hold is not None:
            self._lab.runner.drop(self._hold)
        self._hold = self._ticket = None


def start_streams(lab: Lab) -> list[Handle]:
    """Requests in all slots, which decode now and go on for all that is measured."""
    engine = lab.engine
    new = lab.starting + lab.turns
    handles = [
        engine.submit(Request(prompt=lab.ids(CONTEXT), max_new_tokens=new))
        for _ in range(lab.args.slots)
    ]
    while not all(handle.output.pieces for handle in handles):
        engine.step()
    finish(lab.mover)
    return handles


def timed_turn(lab: Lab, before: Callable[[], None] | None) -> float:
    """Seconds of a turn that decodes all slots and computes no prompt."""
    engine, slots = lab.engine, lab.args.slots
    expected = (engine.counters.new_tokens + slots, engine.counters.tile_steps)
    began = time.perf_counter()
    if before is not None:
        before()
    engine.step()
    seconds = time.perf_counter() - began
    if (engine.counters.new_tokens, engine.counters.tile_steps) != expected:
        raise RuntimeError(f"a turn was to decode {slots} requests and nothing else")
    return seconds


def measure_decoding(lab: Lab) -> dict[str, Any]:
    """Tokens a second of a full batch, by what is loaded meanwhile; windows take turns."""
    args = lab.args
    prompt = lab.ids(args.tokens)
    lab.first_token(prompt)
    chain = lab.runner.chain(prompt)
    streams = start_streams(lab)
    lab.only_on(Tier.DISK)
    seconds: dict[str, list[float]] = {name: [] for name in WINDOWS}
    loads = dict.fromkeys(WINDOWS, 0)
    brought = dict.fromkeys(WINDOWS, 0)
    for number in range(args.windows):
        for name in list(WINDOWS)[:: -1 if number % 2 else 1]:
            tier = WINDOWS[name]
            loader = Loader(lab, chain, tier) if tier is not None else None
            if loader is not None:
                loader.prepare()
            entries = sum(lab.mover.counters.loaded.values())
            for _ in range(args.turns):
                seconds[name].append(timed_turn(lab, loader.begin if loader else None))
                if loader is not None:
                    loader.again()
            brought[name] += sum(lab.mover.counters.loaded.values()) - entries
            if loader is not None:
                loader.stop()
                loads[name] += loader.ended
    for handle in streams:
        handle.cancel()
    lab.engine.drain()
    return _decoding(args, seconds, loads, brought)


def _decoding(
    args: argparse.Namespace,
    seconds: dict[str, list[float]],
    loads: dict[str, int],
    brought: dict[str, int],
) -> dict[str, Any]:
    windows = {
        name: np.asarray(values).reshape(args.windows, args.turns).sum(axis=1)
        for name, values in seconds.items()
    }
    return {
        "slots": args.slots,
        "turns": args.turns,
        "windows": args.windows,
        "loaded_tokens": args.tokens,
        "sides": {
            name: {
                "tokens_per_second": args.slots * args.turns / float(np.median(each)),
                "turn_ms": 1e3 * float(np.median(seconds[name])),
                # Neighbours in time: whatever else the machine does slows both.
                "falls_by": 1 - float(np.median(windows["alone"] / each)),
                "loads_ended": loads[name],
                "entries_brought": brought[name],
            }
            for name, each in windows.items()
        },
    }
