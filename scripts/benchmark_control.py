"""Times the bookkeeping: planning a long prompt against a large directory, and moving its blocks.

No model runs. The directory is filled with chains of random tokens under V4-Flash's geometry.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import Form, Tier, kind_bits
from hybridkv.blocks.eviction import LeastRecentlyUsed
from hybridkv.blocks.pools import PoolSizes
from hybridkv.geometry import Geometry, LayerGeometry
from hybridkv.prefixes.directory import Directory
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.identity import Identity
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds
from hybridkv.prefixes.plan import Plan, PlanOptions, plan_prefix

PROMPT_TOKENS = 2**20
VOCAB = 129_280


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


def milliseconds(function: Callable[[], Any], repeats: int) -> float:
    """Median of ``repeats`` calls."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return 1e3 * float(np.median(seconds))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, in milliseconds and bytes."""
    geometry, rng = flash(), np.random.default_rng(args.seed)
    count = PROMPT_TOKENS // geometry.block_tokens
    shelf = Shelf(geometry, args.blocks, rng)
    ids = rng.integers(0, VOCAB, PROMPT_TOKENS, dtype=np.uint32)
    shelf.store(ids[: -geometry.block_tokens], snapshot=True)
    shelf.fill(args.blocks - 2 * count, 1024)
    options = PlanOptions(tile=geometry.block_tokens)

    def plan(chain: TokenChain) -> Plan:
        found = plan_prefix(shelf.directory, chain, geometry, options)
        assert isinstance(found, Plan)
        assert found.start == PROMPT_TOKENS - geometry.block_tokens, found.explain()
        return found

    def cold() -> None:
        chain = shelf.directory.chain(vocab_size=VOCAB)
        chain.extend(ids)
        plan(chain)

    grown: list[float] = []
    for _ in range(args.repeats):
        chain = shelf.directory.chain(vocab_size=VOCAB)
        chain.extend(ids[: -geometry.block_tokens])
        shelf.directory.find(chain)
        began = time.perf_counter()
        chain.extend(ids[-geometry.block_tokens :])
        plan(chain)
        grown.append(time.perf_counter() - began)

    def move() -> None:
        reservation = shelf.allocator.reserve(blocks=count)
        receipt = shelf.allocator.take(reservation, Form.BLOCK, count)
        shelf.allocator.cancel(reservation)
        again = shelf.allocator.lease(receipt.entries, receipt.generations)
        shelf.allocator.release(again)
        shelf.allocator.release(receipt)

    held = shelf.allocator.entries.nbytes + shelf.directory.nbytes
    return {
        "blocks_published": len(shelf.directory),
        "prompt_blocks": count,
        "plan_cold_hashing_ms": milliseconds(cold, args.repeats),
        "plan_last_block_new_ms": 1e3 * float(np.median(grown)),
        "reserve_lease_free_ms": milliseconds(move, args.repeats),
        "bytes_an_entry": held / len(shelf.allocator.entries),
    }
