"""Times the bookkeeping: planning a long prompt against a large directory, and moving its blocks.

No model runs. The directory is filled with chains of random tokens under V4-Flash's geometry. Peers
do the same in processes of their own; a round runs each figure once on every side.
"""

import argparse
import contextlib
import sys
import time
from typing import Any

import command_line
import numpy as np
from peer_process import PeerProcess

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import Form, Tier, kind_bits
from hybridkv.blocks.eviction import LeastRecentlyUsed
from hybridkv.blocks.pools import PoolSizes
from hybridkv.errors import UserError
from hybridkv.geometry import Geometry, LayerGeometry
from hybridkv.prefixes.directory import Directory
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.identity import Identity
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds
from hybridkv.prefixes.plan import Plan, PlanOptions, plan_prefix

PROMPT_TOKENS = 2**20
VOCAB = 129_280
CHAIN_BLOCKS = 1024
PEERS = ("vllm", "sglang")
FIGURES = {
    "plan": "plan_cold_hashing_ms",
    "plan_again": "plan_last_block_new_ms",
    "move": "reserve_lease_free_ms",
}
"""Commands of both sides, and what their medians are called."""
BARS = {
    "plan_cold_hashing_ms": ("plan of 1,048,576 tokens, hashed anew, ms", 20.0),
    "plan_last_block_new_ms": ("the same when only the last block is new, ms", 3.0),
    "reserve_lease_free_ms": ("reserve, lease and free 8,192 blocks, ms", 3.0),
    "bytes_an_entry": ("bytes an entry", 200.0),
}
"""What is asked: words, and the most that it may be."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes of the measurement, and with whom it is shared."""
    parser.add_argument("--blocks", type=int, default=1_000_000, help="entries of the directory")
    parser.add_argument("--repeats", type=int, default=11, help="rounds, whose medians count")
    parser.add_argument(
        "--peer", nargs="+", default=[], choices=PEERS, help="measure these in turn with ours"
    )
    parser.add_argument("--peer-python", default=sys.executable, help="a Python that has the peers")


def flash() -> Geometry:
    """V4-Flash: 43 layers, ratios 4 and 128, window 128."""
    ratios = [0, 0] + [4, 128] * 20 + [4]
    return Geometry(
        layers=tuple(
            LayerGeometry(window=128, ratio=r, overlap=r == 4, indexed=r == 4) for r in ratios
        ),
        row_width=512,
        rope_width=64,
        index_width=128,
    )


class Shelf:
    """A directory of ``blocks`` entries of one geometry."""

    def __init__(self, geometry: Geometry, blocks: int, rng: np.random.Generator) -> None:
        self.geometry, self.rng = geometry, rng
        self.kinds = kind_bits(block_kinds(geometry))
        both = kind_bits((*block_kinds(geometry), *snapshot_kinds(geometry)))
        self.allocator = Allocator(
            {Tier.DEVICE: PoolSizes(blocks=blocks, snapshots=1024)},
            policy=LeastRecentlyUsed(),
            clock=time.monotonic,
        )
        self.directory = Directory(
            self.allocator,
            Identity.of_geometry(geometry, weights="random", numerics="none"),
            block_tokens=geometry.block_tokens,
            required_kinds=both,
        )

    def store(self, ids: np.ndarray, *, snapshot: bool = False) -> TokenChain:
        """Publishes every complete block, and a snapshot at the end of the last."""
        chain = self.directory.chain()
        chain.extend(ids)
        reservation = self.allocator.reserve(blocks=chain.blocks, snapshots=int(snapshot))
        receipt = self.allocator.take(reservation, Form.BLOCK, chain.blocks)
        self.allocator.commit(receipt.entries, self.kinds)
        self.directory.publish(chain, 0, receipt.entries)
        if snapshot:
            state = self.allocator.take(reservation, Form.SNAPSHOT, 1)
            self.allocator.commit(state.entries, kind_bits(snapshot_kinds(self.geometry)))
            position = chain.blocks * self.geometry.block_tokens
            self.directory.publish_snapshot(chain, position, int(state.entries[0]))
            self.allocator.release(state)
        self.allocator.cancel(reservation)
        self.allocator.release(receipt)
        return chain

    def fill(self, blocks: int, length: int) -> None:
        """Publishes chains of ``length`` random blocks until about ``blocks`` stand."""
        tokens = length * self.geometry.block_tokens
        while len(self.directory) + length <= blocks:
            self.store(self.rng.integers(0, VOCAB, tokens, dtype=np.uint32))


class Ours:
    """The prompt without its last block is stored, with a snapshot at its end."""

    def __init__(self, blocks: int, seed: int) -> None:
        self.geometry, rng = flash(), np.random.default_rng(seed)
        self.size = self.geometry.block_tokens
        self.count = PROMPT_TOKENS // self.size
        if blocks < 2 * self.count:
            raise UserError(f"--blocks is {blocks}: give at least {2 * self.count}")
        self.options = PlanOptions(tile=self.size)
        self.shelf = Shelf(self.geometry, blocks, rng)
        self.ids = rng.integers(0, VOCAB, PROMPT_TOKENS, dtype=np.uint32)
        self.shelf.store(self.ids[: -self.size], snapshot=True)
        self.shelf.fill(blocks - 2 * self.count, CHAIN_BLOCKS)

    def _look_up(self, chain: TokenChain) -> int:
        found = plan_prefix(self.shelf.directory, chain, self.geometry, self.options)
        assert isinstance(found, Plan)
        return found.start

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """The same commands as ``peers/control_peer.py``."""
        return getattr(self, command["call"])()

    def plan(self) -> dict[str, Any]:
        """Plans the whole prompt as a new chain; hashing included."""
        began = time.perf_counter()
        chain = self.shelf.directory.chain(vocab_size=VOCAB)
        chain.extend(self.ids)
        tokens = self._look_up(chain)
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    def plan_again(self) -> dict[str, Any]:
        """Plans it when all but the last block of the chain was looked up before."""
        chain = self.shelf.directory.chain(vocab_size=VOCAB)
        chain.extend(self.ids[: -self.size])
        self.shelf.directory.find(chain)
        began = time.perf_counter()
        chain.extend(self.ids[-self.size :])
        tokens = self._look_up(chain)
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    def move(self) -> dict[str, Any]:
        """Reserves and takes the prompt's blocks, leases them once more and frees them."""
        allocator = self.shelf.allocator
        began = time.perf_counter()
        reservation = allocator.reserve(blocks=self.count)
        receipt = allocator.take(reservation, Form.BLOCK, self.count)
        allocator.cancel(reservation)
        again = allocator.lease(receipt.entries, receipt.generations)
        allocator.release(again)
        allocator.release(receipt)
        return {"seconds": time.perf_counter() - began}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, in milliseconds and bytes; a peer's ratio is its figure over ours."""
    if args.repeats < 1:
        raise UserError(f"--repeats is {args.repeats}: give at least 1")
    ours = Ours(args.blocks, args.seed)
    start = {
        "blocks": args.blocks,
        "prompt_blocks": ours.count,
        "chain_blocks": CHAIN_BLOCKS,
        "block_tokens": ours.size,
        "vocab": VOCAB,
        "seed": args.seed,
    }
    sides: dict[str, Any] = {"hybridkv": ours}
    with contextlib.ExitStack() as stack:
        for name in dict.fromkeys(args.peer):
            remedy = (
                f"pip install -r scripts/peers/control_peer.txt, pip install --no-deps {name}, and "
                "name the Python that has them with --peer-python"
            )
            peer = PeerProcess(args.peer_python, "control_peer.py", {"peer": name, **start}, remedy)
            stack.callback(peer.close)
            sides[name] = peer
        seconds: dict[str, dict[str, list[float]]] = {n: {c: [] for c in FIGURES} for n in sides}
        for _ in range(args.repeats):
            for call in FIGURES:
                for name, side in sides.items():
                    answer = side.ask({"call": call})
                    found = answer.get("tokens", PROMPT_TOKENS - ours.size)
                    assert found == PROMPT_TOKENS - ours.size, (name, call, found)
                    seconds[name][call].append(answer["seconds"])
    figures = {
        name: {FIGURES[call]: 1e3 * float(np.median(values)) for call, values in calls.items()}
        for name, calls in seconds.items()
    }
    entries = ours.shelf.allocator.entries
    mine = figures.pop("hybridkv") | {
        "bytes_an_entry": (entries.nbytes + ours.shelf.directory.nbytes) / len(entries)
    }
    peers = {name: {**sides[name].about, **its} for name, its in figures.items()}
    for its in peers.values():
        its["ratio"] = {key: its[key] / value for key, value in mine.items()}
    return {
        "blocks_published": len(ours.shelf.directory),
        "prompt_blocks": ours.count,
        "repeats": args.repeats,
        **mine,
        "peers": peers,
    }


def report(result: dict[str, Any]) -> None:
    """Each figure, its bar, and what it is on the other sides."""
    peers = result["peers"]
    columns = [f"{name} {peer['version']}" for name, peer in peers.items()]
    command_line.print_table(
        f"bookkeeping with {result['blocks_published']:,} published blocks",
        ["what", "hybridkv", "bar", *(c for name in columns for c in (name, "ratio"))],
        [
            (
                name,
                f"{result[key]:.2f}",
                f"{bar:g}",
                *(
                    cell
                    for peer in peers.values()
                    for cell in (f"{peer[key]:.2f}", f"{peer['ratio'][key]:.2f}x")
                ),
            )
            for key, (name, bar) in BARS.items()
        ],
    )
