"""One replay of a trace: a scheme, a policy and a budget in, what came of it out."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float64

from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.pools import PoolSizes
from hybridkv.errors import UserError
from hybridkv.kinds import Kind
from hybridkv.prefixes.policy import DEFAULT, SnapshotPolicy
from hybridkv.replay import cache, queueing
from hybridkv.replay.cache import CacheOptions, CacheResult
from hybridkv.replay.catalog import HardwareData, ModelData
from hybridkv.replay.costs import Server
from hybridkv.replay.pools import Budget, places
from hybridkv.replay.queueing import QueueOptions, Times, Work
from hybridkv.replay.schemes import Scheme, SchemeName, scheme_of
from hybridkv.replay.trace import BLOCK, Trace

POINTS = 300
"""Of a curve over time."""
WINDOW_S = 60.0
"""Over which bytes a second are averaged."""
PERCENTILES = (50, 95, 99)
OVERLOADED = 0.98
"""Share of the time computing from which on a queue only grows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What to replay a trace under."""

    scheme: SchemeName = SchemeName.HYBRID
    policy_name: str = "default"
    policy: SnapshotPolicy = DEFAULT
    eviction: str = "value"
    """``lru`` or ``value``."""
    budget: Budget = dataclasses.field(default_factory=Budget)
    replay: bool = True
    tile: int = BLOCK
    """Tokens between positions that can be resumed from; also of a tile step."""
    queue: QueueOptions = dataclasses.field(default_factory=QueueOptions)

    def __post_init__(self) -> None:
        if self.tile < BLOCK or self.tile % BLOCK:
            raise UserError(f"a tile of {self.tile} tokens: give a multiple of {BLOCK}")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """One replay."""

    trace: Trace
    """Those of its requests that fit the devices."""
    server: Server
    options: RunOptions
    pools: Mapping[Tier, PoolSizes]
    cache: CacheResult
    work: Work
    times: Times
    refused: int
    """Requests larger than the devices' room."""
    refused_tokens: int
    seconds: float
    """Of this process."""

    # Tokens.

    @property
    def prompt_tokens(self) -> int:
        """Of the requests that were served."""
        return int(self.trace.prompt.sum())

    @property
    def ideal_tokens(self) -> int:
        """That had been computed before."""
        return int(self.cache.ideal.sum())

    @property
    def reused_tokens(self) -> int:
        """That were not computed again."""
        return int(self.cache.reused.sum())

    @property
    def ideal_ratio(self) -> float:
        """Of all prompt tokens."""
        return self.ideal_tokens / max(self.prompt_tokens, 1)

    @property
    def hit_ratio(self) -> float:
        """Reused tokens of all prompt tokens."""
        return self.reused_tokens / max(self.prompt_tokens, 1)

    @property
    def found_ratio(self) -> float:
        """Tokens whose blocks were found of all prompt tokens, restorable or not."""
        return int(self.cache.found.sum()) / max(self.prompt_tokens, 1)

    @property
    def reused_share(self) -> float:
        """Reused tokens of the ideal."""
        return self.reused_tokens / self.ideal_tokens if self.ideal_tokens else 1.0

    @property
    def restorable_share(self) -> float:
        """Of the ideal, tokens up to which a state was stored: a replay may reuse more."""
        restorable = int(np.minimum(self.cache.restorable, self.cache.ideal).sum())
        return restorable / self.ideal_tokens if self.ideal_tokens else 1.0

    # Seconds.

    @property
    def utilisation(self) -> float:
        """Share of the trace's time in which the server would compute; above 1 it falls behind."""
        arrival = self.work.arrival / self.options.queue.rate
        span = float(arrival[-1]) if len(arrival) else 0.0
        return self.times.busy / span if span else 0.0

    @property
    def overloaded(self) -> bool:
        """Whether the queue grows to the end, so that times say how long the trace is."""
        return self.utilisation > OVERLOADED

    # Bytes.

    def bytes_over_time(self, tier: Tier) -> Float64[np.ndarray, " n"]:
        """Bytes of blocks and snapshots that a tier holds after each request."""
        scheme, stored = self.server.scheme, self.cache.stored
        blocks = stored[tier, Form.BLOCK].astype(np.float64) * scheme.block_bytes
        return blocks + stored[tier, Form.SNAPSHOT] * float(scheme.snapshot_bytes)

    def peak_by_kind(self, tier: Tier) -> dict[str, int]:
        """Most bytes of each kind that a tier held."""
        scheme, stored = self.server.scheme, self.cache.stored
        blocks = int(stored[tier, Form.BLOCK].max(initial=0))
        states = int(stored[tier, Form.SNAPSHOT].max(initial=0))
        kinds = {
            kind.value: blocks * int(each * BLOCK)
            for kind, each in scheme.geometry.bytes_per_token.items()
            if each
        }
        if states:
            kinds[f"{Kind.WINDOW.value} and {Kind.TAIL.value}"] = states * scheme.snapshot_bytes
        return kinds

    def peak_rate(self, size: np.ndarray) -> float:
        """Most bytes a second over ``WINDOW_S``, of bytes that each request moves."""
        arrival = self.work.arrival / self.options.queue.rate
        windows = np.bincount((arrival // WINDOW_S).astype(np.int64), weights=size, minlength=1)
        return float(windows.max()) / WINDOW_S


def replay(trace: Trace, model: ModelData, hardware: HardwareData, options: RunOptions) -> Result:
    """Replays a trace.

    Raises:
      UserError: the model does not fit the hardware, or the options can't be meant.
    """
    began = time.process_time()
    scheme = scheme_of(options.scheme, model.geometry)
    server = Server(model=model, hardware=hardware, scheme=scheme, tile=options.tile)
    running = _running_bytes(scheme, trace)
    pools = places(server, options.budget, trace)
    fits = running <= server.room[Tier.DEVICE]
    if len(pools) > 1:  # all that is loaded must be on the device together
        fits &= -(-trace.prompt // BLOCK) <= pools[Tier.DEVICE].blocks
    served = trace.only(fits)
    if not len(served):
        raise UserError(
            f"no request of {trace.name} fits {hardware.name} under the {scheme.name} scheme: the "
            f"smallest takes {running.min() / 1e9:.1f} GB of {server.room[Tier.DEVICE] / 1e9:.1f}"
        )
    outcome = cache.run(
        scheme,
        CacheOptions(
            pools=pools,
            policy=options.policy,
            eviction=server.eviction(options.eviction),
            cost=server.cost,
            tile=options.tile,
            replay=options.replay,
        ),
        served,
    )
    none = np.zeros(len(served), np.int64)
    work = Work(
        arrival=served.arrival,
        prompt=served.prompt,
        start=outcome.reused,
        output=served.output,
        host_bytes=outcome.loaded.get(Tier.HOST, none),
        disk_bytes=outcome.loaded.get(Tier.DISK, none),
        running_bytes=running[fits],
    )
    return Result(
        trace=served,
        server=server,
        options=options,
        pools=pools,
        cache=outcome,
        work=work,
        times=queueing.simulate(server, options.queue, work),
        refused=int((~fits).sum()),
        refused_tokens=int(trace.prompt[~fits].sum()),
        seconds=time.process_time() - began,
    )


def _running_bytes(scheme: Scheme, trace: Trace) -> np.ndarray:
    """Bytes of each request while it runs, int64 ``[n]``."""
    return np.asarray(
        [scheme.running_bytes(int(tokens)) for tokens in trace.prompt + trace.output], np.int64
    )


def summary(result: Result) -> dict[str, Any]:
    """What a replay says, as JSON."""
    options, scheme, outcome, times = (
        result.options,
        result.server.scheme,
        result.cache,
        result.times,
    )
    lost = dict(sorted(outcome.lost.items(), key=lambda item: -item[1]))
    return {
        "scheme": str(options.scheme),
        "policy": options.policy_name if scheme.has_snapshots else "none needed",
        "eviction": options.eviction,
        "replay": options.replay,
        "tile": options.tile,
        "requests": len(result.trace),
        "refused_requests": result.refused,
        "refused_tokens": result.refused_tokens,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": int(result.trace.output.sum()),
        "ideal_tokens": result.ideal_tokens,
        "reused_tokens": result.reused_tokens,
        "replayed_tokens": int(outcome.replayed.sum()),
        "ideal_token_hit_ratio": result.ideal_ratio,
        "token_hit_ratio": result.hit_ratio,
        "found_token_ratio": result.found_ratio,
        "restorable_share": result.restorable_share,
        "reused_share": result.reused_share,
        "requests_with_a_hit": int((outcome.reused > 0).sum()),
        "hits_from_a_snapshot": int(outcome.snapshot.sum()),
        "hits_lost_whole": int(((outcome.ideal >= options.tile) & (outcome.reused == 0)).sum()),
        "lost_tokens": lost,
        "snapshots_written": outcome.written,
        "snapshots_without_room": outcome.not_written,
        "ttft_s": percentiles(times.first_token),
        "ttft_alone_s": percentiles(times.alone),
        "time_per_output_token_s": percentiles(_per_token(result)),
        "utilisation": result.utilisation,
        "overloaded": result.overloaded,
        "device_seconds_per_request": times.busy / max(len(result.trace), 1),
        "most_running": times.most_running,
        "places": {
            tier.name.lower(): {"blocks": pool.blocks, "snapshots": pool.snapshots}
            for tier, pool in result.pools.items()
        },
        "bytes": {
            "block": scheme.block_bytes,
            "snapshot": scheme.snapshot_bytes,
            "a_token": scheme.block_bytes / BLOCK,
        },
        "peak_bytes": {tier.name.lower(): result.peak_by_kind(tier) for tier in result.pools},
        "loads": {
            tier.name.lower(): {
                "bytes": int(size.sum()),
                "peak_bytes_per_second": result.peak_rate(size),
            }
            for tier, size in outcome.loaded.items()
        },
        "cpu_seconds": result.seconds,
        "timeline": timeline(result),
    }


def percentiles(values: np.ndarray) -> dict[str, float | None]:
    """p50, p95, p99 and the mean of what is there."""
    there = values[~np.isnan(values)]
    if not there.size:
        return {**{f"p{q}": None for q in PERCENTILES}, "mean": None}
    found = {f"p{q}": float(np.percentile(there, q)) for q in PERCENTILES}
    return {**found, "mean": float(there.mean())}


def _per_token(result: Result) -> np.ndarray:
    """Seconds between the tokens of each answer of several."""
    output = result.trace.output
    several = output > 1
    span = result.times.end[several] - result.times.first_token[several]
    return np.asarray(span / (output[several] - 1))


def timeline(result: Result) -> dict[str, Any]:
    """Memory and hits over time, at ``POINTS`` requests."""
    count = len(result.trace)
    at = np.unique(np.linspace(0, count - 1, min(POINTS, count)).astype(np.int64))
    reused, prompt = np.cumsum(result.cache.reused), np.cumsum(result.trace.prompt)
    return {
        "seconds": (result.work.arrival[at] / result.options.queue.rate).round(3).tolist(),
        "hit_ratio_so_far": (reused[at] / prompt[at]).round(5).tolist(),
        "stored_bytes": {
            tier.name.lower(): result.bytes_over_time(tier)[at].astype(np.int64).tolist()
            for tier in result.pools
        },
        "ttft_s": [round(float(x), 4) for x in result.times.first_token[at]],
    }
