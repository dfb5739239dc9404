"""The bookkeeping of an installed engine as a process that takes commands, one JSON line each.

The first line is ``{"peer": "vllm", "blocks": ..., "prompt_blocks": ..., "chain_blocks": ...,
"block_tokens": ..., "vocab": ..., "seed": ...}``: a pool of ``blocks`` is made, the prompt without
its last block is stored, then chains of random blocks while two prompts' room is left. No model
runs and no device is used.

Commands: ``plan``, ``plan_again`` and ``move``; see the methods of ``Peer``. The prompt lies ready
in the form the engine itself keeps tokens in.
"""

import ctypes
import gc
import importlib.metadata
import json
import os
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


class Peer:
    """A filled cache; each command runs once and answers its seconds."""

    def __init__(self, start: dict[str, Any]) -> None:
        self.size: int = start["block_tokens"]
        self.count: int = start["prompt_blocks"]
        make = self.load()
        rng = np.random.default_rng(start["seed"])

        def draw(blocks: int) -> Any:
            return self.form(rng.integers(0, start["vocab"], blocks * self.size))

        self.ids = draw(self.count)
        before = _resident()
        make(start["blocks"])
        self.fill(self.ids[: -self.size])
        self.published = self.count - 1
        while self.published + start["chain_blocks"] <= start["blocks"] - 2 * self.count:
            self.fill(draw(start["chain_blocks"]))
            self.published += start["chain_blocks"]
        self.bytes_a_block = (_resident() - before) / start["blocks"]
        gc.freeze()  # as vLLM does once it has started; it only helps a peer

    def plan(self) -> dict[str, Any]:
        """Looks the whole prompt up as a new request; hashing included."""
        began = time.perf_counter()
        tokens = self.look_up(self.request(self.ids))
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    def plan_again(self) -> dict[str, Any]:
        """Looks it up when all but the last block was looked up by this request before."""
        request = self.request(self.ids[: -self.size])
        self.look_up(request)
        last = self.ids[-self.size :]
        began = time.perf_counter()
        tokens = self.look_up(self.grow(request, last))
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    def move(self) -> dict[str, Any]:
        """Allocates the prompt's blocks, takes a second hold where there is one, and frees them."""
        began = time.perf_counter()
        self.allocate_and_free()
        return {"seconds": time.perf_counter() - began}


class Vllm(Peer):
    """vLLM's KVCacheManager: a pool of blocks found by chained SHA-256 (its default)."""

    def load(self) -> Callable[[int], None]:
        """Imports the engine, which counts in no figure, and returns what makes the pool."""
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        init_none_hash(sha256)
        hasher = get_request_block_hasher(self.size, sha256)
        params = SamplingParams(max_tokens=1)
        self.request = lambda ids: Request("request", ids, params, None, block_hasher=hasher)
        spec = FullAttentionSpec(
            block_size=self.size, num_kv_heads=1, head_size=64, dtype=torch.float16
        )

        def make(blocks: int) -> None:
            config = KVCacheConfig(
                num_blocks=blocks + 1,  # the pool keeps one as its null block
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            )
            self.manager = KVCacheManager(
                config,
                max_model_len=(self.count + 1) * self.size,
                scheduler_block_size=self.size,
                hash_block_size=self.size,
            )

        return make

    form = staticmethod(np.ndarray.tolist)

    def fill(self, ids: list[int]) -> None:
        """Stores a finished request."""
        request = self.request(ids)
        if self.manager.allocate_slots(request, len(ids)) is None:
            raise MemoryError("the pool is full")
        self.manager.free(request)

    def look_up(self, request: Any) -> int:
        """Tokens found, with their blocks."""
        return self.manager.get_computed_blocks(request)[1]

    def grow(self, request: Any, ids: list[int]) -> Any:
        """Hashes only the new block."""
        request.append_output_token_ids(ids)
        return request

    def allocate_and_free(self) -> None:
        """New blocks, a second reference to each, both given up."""
        pool = self.manager.block_pool
        blocks = pool.get_new_blocks(self.count)
        pool.touch(blocks)
        pool.free_blocks(blocks)
        pool.free_blocks(blocks)


class Sglang(Peer):
    """SGLang's UnifiedRadixCache: a radix tree in Rust that compares the tokens themselves."""

    def load(self) -> Callable[[int], None]:
        """Imports the engine, which counts in no figure, and returns what makes the pool."""
        import torch
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        def make(blocks: int) -> None:
            self.pool = PagedTokenToKVPoolAllocator(
                blocks * self.size, self.size, torch.float16, "cpu", None, False
            )
            self.tree = UnifiedRadixCache(
                CacheInitParams(
                    disable=False,
                    req_to_token_pool=None,
                    token_to_kv_pool_allocator=self.pool,
                    page_size=self.size,
                    tree_components=(ComponentType.FULL,),
                )
            )

        torch.set_num_threads(1)  # as ours; a second one waits whole ticks on a busy machine
        self.match = lambda ids: self.tree.match_prefix(MatchPrefixParams(key=RadixKey(ids)))
        self.insert = lambda ids, slots: self.tree.insert(
            InsertParams(key=RadixKey(ids), value=slots)
        )
        return make

    def form(self, ids: np.ndarray) -> array:
        """64-bit ids, the only ones the tree takes."""
        return array("q", ids.astype(np.int64).tobytes())

    def fill(self, ids: array) -> None:
        """Stores a sequence with slots of its own."""
        self.insert(ids, self.pool.alloc(len(ids)))

    def request(self, ids: array) -> array:
        """Nothing is kept between look-ups but the ids; they get room to grow without a copy."""
        ids.append(0)
        ids.pop()
        return ids

    def look_up(self, ids: array) -> int:
        """Tokens found, with their slots."""
        return len(self.tree.path_device_indices(self.match(ids).last_device_node))

    def grow(self, ids: array, new: array) -> array:
        """The tree is walked from its root again."""
        ids.extend(new)
        return ids

    def allocate_and_free(self) -> None:
        """New slots, given up; there is no second hold on a page."""
        self.pool.free_segment(self.pool.alloc(self.count * self.size), start_pos=0)


def _resident() -> int:
    """Bytes of memory this process holds once what is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Answers each line with a line; nothing else goes to standard output or error."""
    out = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=out, flush=True)

    try:
        start = json.loads(sys.stdin.readline())
        name = start.pop("peer")
        version = importlib.metadata.version(name)
        peer = {"vllm": Vllm, "sglang": Sglang}[name](start)
        answer(
            {
                "version": version,
                "blocks_published": peer.published,
                "bytes_an_entry": peer.bytes_a_block,
            }
        )
        for line in sys.stdin:
            answer(getattr(peer, json.loads(line)["call"])())
    except Exception as error:  # an engine that lacks a device or a package fails in many ways
        answer({"error": f"{type(error).__name__}: {error}"})
        sys.exit(2)


if __name__ == "__main__":
    main()
