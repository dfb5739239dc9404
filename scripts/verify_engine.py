"""Requests run together against each of them alone, bit for bit: the ``engine`` check."""

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from hybridkv.arithmetic import cdiv
from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.invariants import check
from hybridkv.engine.engine import Engine, EngineOptions
from hybridkv.engine.handle import Handle
from hybridkv.engine.requests import Finish, Output, Request
from hybridkv.engine.runner import RunnerOptions
from hybridkv.engine.sampling import SamplingOptions
from hybridkv.engine.scheduler import Stage
from hybridkv.state.batch import StepOptions
from hybridkv.state.capacity import Capacity
from models.deepseek_v4.runtime import DeepseekV4Runtime
from models.deepseek_v4.toy import toy_model
from models.llama.runtime import LlamaRuntime
from models.llama.toy import toy_llama

TILE, SLOTS, LANES, LONGEST = 16, 8, 2, 240
OUTSTANDING = 14
"""Requests that are submitted and not ended, at most: more than there are slots."""
PAUSES = 0.01
"""How often nobody asks for a while."""
SHARE = 1.3
"""Capacity over what as many average requests as there are slots demand."""
SAMPLED = SamplingOptions(temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.1)


@dataclasses.dataclass(kw_only=True, eq=False)
class Asked:
    """A request, what it is an example of, and when it is cancelled, if it is."""

    sort: str
    request: Request
    cancel_after: int | None
    """Turns after submission."""
    handle: Handle | None = None
    turn: int = 0
    parked: bool = False


class Traffic:
    """Random requests of all sorts; those of conversations go on from earlier outputs."""

    sorts = ("shared prefix", "fork", "conversation", "resend", "new")

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.vocab_size = vocab_size
        self._bases = [self.ids(int(self.rng.integers(40, 150))) for _ in range(6)]
        self._said: list[np.ndarray] = []
        """Prompts with their outputs, for what goes on from them."""

    def ids(self, length: int) -> np.ndarray:
        """Random token ids."""
        return self.rng.integers(0, self.vocab_size, length).astype(np.int32)

    def ended(self, asked: Asked) -> None:
        """Remembers what a conversation can go on from."""
        if asked.handle is not None:
            prompt = np.asarray(asked.request.prompt)
            said = np.asarray(asked.handle.output.tokens, np.int32)
            self._said = [*self._said[-40:], np.concatenate([prompt, said])]

    def next(self) -> Asked:
        """One more request."""
        rng = self.rng
        sort = str(rng.choice(self.sorts, p=(0.35, 0.2, 0.25, 0.1, 0.1)))
        new = int(rng.integers(1, 28))
        prompt = self._prompt(sort)[: LONGEST - new - 2]
        sampling = SamplingOptions()
        if rng.random() < 0.5:
            sampling = dataclasses.replace(SAMPLED, seed=int(rng.integers(0, 2**32)))
        request = Request(
            prompt=prompt,
            max_new_tokens=new,
            sampling=sampling,
            samples=2 if rng.random() < 0.05 else 1,
            stop_tokens=tuple(int(t) for t in rng.integers(0, self.vocab_size, 3)),
            priority=int(rng.choice(3, p=(0.7, 0.2, 0.1))),
        )
        cancel = int(rng.integers(0, 40)) if rng.random() < 0.12 else None
        return Asked(sort=sort, request=request, cancel_after=cancel)

    def _prompt(self, sort: str) -> np.ndarray:
        rng = self.rng
        some = self.ids(int(rng.integers(1, 50)))
        if sort == "new" or (sort != "shared prefix" and not self._said):
            return self.ids(int(rng.integers(1, 180)))
        if sort == "shared prefix":
            return np.concatenate([self._bases[int(rng.integers(len(self._bases)))], some])
        earlier = self._said[int(rng.integers(len(self._said)))]
        if sort == "resend":
            return earlier[: max(1, len(earlier) - int(rng.integers(0, 3)))]
        if sort == "fork":
            return np.concatenate([earlier[: int(rng.integers(1, len(earlier) + 1))], some])
        return np.concatenate([earlier[: LONGEST - 80], some])


def make_engine(runtime: Any, blocks: int, snapshots: int, *, debug: bool, **more: Any) -> Engine:
    """An engine with strict guards that keeps digests of all logits; ``more`` of its runner."""
    options = StepOptions(
        tile=TILE,
        lanes=LANES,
        key_block=8,
        index_block=16,
        expert_rows=4,
        sequential=jax.default_backend() == "cpu",
    )
    each = cdiv(LONGEST, runtime.geometry.block_tokens)
    capacity = Capacity(blocks=blocks, slots=SLOTS, blocks_per_sequence=each)
    sizes = RunnerOptions(capacity=capacity, snapshots=snapshots, debug=debug, **more)
    return Engine(runtime, options, sizes, EngineOptions(digests=True, strict=True))


def run_together(engine: Engine, traffic: Traffic, count: int) -> list[Asked]:
    """``count`` requests through the engine, some cancelled on the way."""
    asked: list[Asked] = []
    running: list[Asked] = []
    turn = silent_until = 0
    while len(asked) < count or running:
        if traffic.rng.random() < PAUSES:  # long enough for idle work to begin
            silent_until = turn + int(traffic.rng.integers(20, 80))
        while turn >= silent_until and len(asked) < count and len(running) < OUTSTANDING:
            one = traffic.next()
            one.handle, one.turn = engine.submit(one.request), turn
            asked.append(one)
            running.append(one)
        engine.step()
        turn += 1
        for one in running:
            assert one.handle is not None
            late = one.cancel_after is not None and turn - one.turn > one.cancel_after
            if late:
                engine.cancel(one.handle)
            if one.handle.done:
                traffic.ended(one)
        running = [one for one in running if one.handle is not None and not one.handle.done]
    return asked


def compare(engine: Engine, asked: list[Asked]) -> dict[str, dict[str, int]]:
    """Each output against the same request alone in an empty engine, by sort of request."""
    rows = {sort: {"outputs": 0, "ended early": 0, "mismatches": 0} for sort in Traffic.sorts}
    for one in asked:
        assert one.handle is not None
        row = rows[one.sort]
        for sample, output in enumerate(one.handle.outputs):
            row["outputs"] += 1
            row["ended early"] += output.finish is Finish.CANCELLED
            if output.pieces:
                row["mismatches"] += not _same(engine, one.request, sample, output)
            elif output.finish is not Finish.CANCELLED:
                row["mismatches"] += 1
    return rows


def _same(engine: Engine, request: Request, sample: int, output: Output) -> bool:
    seed = (request.sampling.seed + sample) % 2**32
    alone = dataclasses.replace(
        request,
        samples=1,
        priority=0,
        sampling=dataclasses.replace(request.sampling, seed=seed),
        max_new_tokens=len(output.pieces),
    )
    engine.reset()
    (other,) = engine.run([alone])
    return other.logits_digest == output.logits_digest and other.tokens == output.tokens


def baseline(engine: Engine) -> dict[str, Any]:
    """What an engine holds when nothing runs: only what is published."""
    allocator = engine.runner.allocator
    check(allocator)
    entries = allocator.entries
    unpublished = {}
    for form in Form:
        shown = np.count_nonzero(entries.published & (entries.form == form))
        unpublished[form.name.lower()] = allocator.pools[Tier.DEVICE][form].used - int(shown)
    return {
        "free slots": engine.runner.free_slots,
        "open leases": len(allocator.leases.open),
        "leased entries": int(np.count_nonzero(entries.leases)),
        "reservations": len(allocator.reservations.left),
        "unpublished blocks": unpublished["block"],
        "unpublished snapshots": unpublished["snapshot"],
        "requests": sum(engine.stages()[stage] for stage in Stage),
    }


AT_REST = {
    "free slots": SLOTS,
    "open leases": 0,
    "leased entries": 0,
    "reservations": 0,
    "unpublished blocks": 0,
    "unpublished snapshots": 0,
    "requests": 0,
}


def verify(model: str, count: int, seed: int) -> dict[str, Any]:
    """The check for one model; ``ok`` is whether everything held."""
    runtime: Any = (
        DeepseekV4Runtime(toy_model()) if model == "deepseek_v4" else LlamaRuntime(toy_llama())
    )
    block = runtime.geometry.block_tokens
    sample = Traffic(runtime.vocab_size, seed)
    rooms = [
        len(x.request.prompt) + x.request.max_new_tokens
        for x in (sample.next() for _ in range(200))
    ]
    demand = SLOTS * float(np.mean([cdiv(room, block) for room in rooms]))
    blocks = round(SHARE * demand)
    engine = make_engine(runtime, blocks, snapshots=24, debug=True)
    began = time.perf_counter()
    asked = run_together(engine, Traffic(runtime.vocab_size, seed), count)
    engine.drain()
    together = time.perf_counter() - began
    rest, counters = baseline(engine), dataclasses.asdict(engine.counters)
    counters["ended"] = {finish.value: n for finish, n in counters["ended"].items()}
    # Another capacity: it must not matter, and nothing is ever evicted in it.
    alone = make_engine(runtime, 4 * blocks, snapshots=24, debug=False)
    rows = compare(alone, asked)
    mismatches = sum(row["mismatches"] for row in rows.values())
    compiled = engine.counters.compilations + alone.counters.compilations
    return {
        "ok": not mismatches and not compiled and rest == AT_REST,
        "requests": count,
        "rows": rows,
        "mismatches": mismatches,
        "compilations": compiled,
        "at rest": rest == AT_REST,
        "held at rest": rest,
        "blocks": blocks,
        "blocks demanded": demand,
        "counters": counters,
        "generated": dataclasses.asdict(engine.generated_use),
        "idle": dataclasses.asdict(engine.idle_counters),
        "probe": engine.probe.detail if engine.probe else None,
        "seconds together": together,
    }
