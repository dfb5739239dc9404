"""What a replay recommends, and the conditions under which it would say otherwise.

The scheme is the generic one unless something else is better by ``margin`` of the device's time,
or the generic one cannot hold the requests at all: fewer kinds are fewer ways to miss. Nothing here
knows the name of a trace.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridkv.blocks.entries import Form, Tier
from hybridkv.replay.costs import Server
from hybridkv.replay.run import Result
from hybridkv.replay.schemes import SchemeName
from hybridkv.replay.trace import BLOCK

MARGIN = 0.10
"""What another scheme must save of the device's time."""
KEPT = 0.99
"""Share of the reused tokens that a budget keeps."""
LONGEST = 2**20
"""Tokens up to which a break-even is searched."""
REFUSED = 0.001
"""Share of requests that may be too large for a scheme."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """One kind of request on a server, for break-evens."""

    prompt: float
    output: float
    reused: float
    """Share of the prompt."""
    running: float
    """Sequences that decode together, where they fit."""


def request_seconds(server: Server, load: Load) -> float:
    """Seconds of the devices for one request: tiles, its share of decode steps, loads aside.

    Infinite where the request does not fit.
    """
    tokens = load.prompt + load.output
    fit = server.room[Tier.DEVICE] // server.scheme.running_bytes(math.ceil(tokens))
    if fit < 1:
        return math.inf
    together = max(min(load.running, fit), 1.0)
    context = load.prompt + load.output / 2
    start = load.prompt * load.reused
    tiles = server.tiles_seconds(start, (load.prompt - start) / server.tile)
    step = server.decode_seconds(together, together * context)
    return tiles + load.output * step / together


def break_even_context(hybrid: Server, generic: Server, load: Load, margin: float) -> int | None:
    """The shortest prompt, in whole blocks, from which hybrid saves ``margin`` with no reuse."""

    def better(prompt: float) -> bool:
        same = dataclasses.replace(load, prompt=prompt, reused=0.0)
        return request_seconds(generic, same) >= (1 + margin) * request_seconds(hybrid, same)

    low, high = 0, LONGEST // BLOCK
    if not better(high * BLOCK):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if better(middle * BLOCK) else (middle, high)
    return high * BLOCK


def break_even_reuse(
    hybrid: Server, generic: Server, load: Load, margin: float, kept: float
) -> float | None:
    """The share of prompt tokens computed before from which hybrid saves ``margin``.

    Args:
      hybrid: one server.
      generic: the other.
      load: whose prompt and output hold throughout.
      margin: to be saved.
      kept: of what was computed before, the share that the generic scheme's tiers still have.
    """
    for percent in range(101):
        share = percent / 100
        ours = request_seconds(hybrid, dataclasses.replace(load, reused=share))
        theirs = request_seconds(generic, dataclasses.replace(load, reused=share * kept))
        if theirs >= (1 + margin) * ours:
            return share
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budgets:
    """Places that keep ``KEPT`` of what was reused, and where they are."""

    blocks: int
    snapshots: int
    bytes: int
    by_tier: Mapping[str, int]
    """Bytes of each tier, filled from the fastest."""
    missing: int
    """Bytes that no tier has room for."""


def budgets(result: Result) -> Budgets:
    """The least places of an order by last use that would have kept ``KEPT`` of the reuse."""
    outcome, server = result.cache, result.server
    blocks = _least(outcome.depth[Form.BLOCK], outcome.reused)
    states = _least(outcome.depth[Form.SNAPSHOT], np.where(outcome.snapshot, outcome.reused, 0))
    size = blocks * server.scheme.block_bytes + states * server.scheme.snapshot_bytes
    left, by_tier = size, {}
    for tier, room in server.room.items():
        by_tier[tier.name.lower()] = taken = min(left, int(room))
        left -= taken
    return Budgets(blocks=blocks, snapshots=states, bytes=size, by_tier=by_tier, missing=left)


def _least(depth: np.ndarray, weight: np.ndarray) -> int:
    """The smallest depth up to which ``KEPT`` of the weight lies."""
    if not weight.sum():
        return 0
    order = np.argsort(depth, kind="stable")
    total = np.cumsum(weight[order])
    return int(depth[order][np.searchsorted(total, KEPT * total[-1])])


def disk_needs(result: Result, budget: Budgets) -> dict[str, float]:
    """Bytes, and bytes a second at the busiest, that a disk tier of this budget moves."""
    outcome, scheme = result.cache, result.server.scheme
    last = next(reversed(tuple(result.pools)))
    grown = np.diff(outcome.stored[last, Form.BLOCK], prepend=0).clip(min=0) * scheme.block_bytes
    states = np.diff(outcome.stored[last, Form.SNAPSHOT], prepend=0).clip(min=0)
    written = grown + states * scheme.snapshot_bytes
    read = outcome.loaded.get(Tier.DISK, np.zeros(len(result.trace)))
    return {
        "bytes": float(budget.by_tier["disk"]),
        "read_bytes_per_second": result.peak_rate(read),
        "write_bytes_per_second": result.peak_rate(written),
        "bytes_to_keep_all": float(result.bytes_over_time(last).max(initial=0.0)),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """A recommendation with what it rests on."""

    scheme: SchemeName
    policy: str | None
    reasons: tuple[str, ...]
    numbers: Mapping[str, Any]

    @property
    def adopt(self) -> bool:
        """Whether it is anything but staying with the generic scheme."""
        return self.scheme is not SchemeName.GENERIC

    @property
    def headline(self) -> str:
        """One line."""
        if not self.adopt:
            return "stay with the generic scheme"
        policy = f", snapshot policy {self.policy}" if self.policy else ""
        return f"adopt the {self.scheme} scheme{policy}"


def advise(
    results: Mapping[SchemeName, Result],
    policies: Sequence[Result] = (),
    margin: float = MARGIN,
) -> Advice:
    """What to do with this traffic on this server.

    Args:
      results: one replay of the trace for each scheme; hybrid and generic must be there.
      policies: replays of the hybrid scheme with other snapshot policies.
      margin: what a scheme must save to be preferred to generic.
    """
    generic = results[SchemeName.GENERIC]
    best = _best_policy([results[SchemeName.HYBRID], *policies])
    homogeneous = results.get(SchemeName.HOMOGENEOUS)
    chosen, reasons = _choose(generic, best, homogeneous, margin)
    load, kept = _load(best), generic.reused_share if generic.ideal_tokens else 1.0
    context = break_even_context(best.server, generic.server, load, margin)
    reuse = break_even_reuse(best.server, generic.server, load, margin, kept)
    budget = budgets(best)
    disk = disk_needs(best, budget)
    reasons += _conditions(best, load, context, reuse, kept)
    if chosen is not SchemeName.GENERIC:
        reasons += _budget_lines(best, budget, disk)
    numbers = {
        "margin": margin,
        "device_seconds_per_request": {
            str(name): each.times.busy / max(len(each.trace), 1) for name, each in results.items()
        },
        "break_even_context_tokens": context,
        "break_even_reuse_ratio": reuse,
        "mean_prompt_tokens": load.prompt,
        "ideal_reuse_ratio": best.ideal_ratio,
        "budgets": dataclasses.asdict(budget),
        "disk": disk,
    }
    policy = best.options.policy_name if chosen is SchemeName.HYBRID else None
    return Advice(scheme=chosen, policy=policy, reasons=tuple(reasons), numbers=numbers)


def _best_policy(results: Sequence[Result]) -> Result:
    """The least bytes among those within 1 % of the least time of the devices."""
    least = min(each.times.busy for each in results)
    near = [each for each in results if each.times.busy <= 1.01 * least]
    return min(near, key=_peak_bytes)


def _peak_bytes(result: Result) -> float:
    last = next(reversed(tuple(result.pools)))
    return float(result.bytes_over_time(last).max(initial=0.0))


def _load(result: Result) -> Load:
    """The mean request, and how many decode together on average."""
    times, trace = result.times, result.trace
    decoding = np.nansum(times.end - times.first_token)
    return Load(
        prompt=float(trace.prompt.mean()),
        output=float(trace.output.mean()),
        reused=result.hit_ratio,
        running=max(float(decoding) / max(times.span, 1e-9), 1.0),
    )


def _seconds(result: Result) -> float:
    return result.times.busy / max(len(result.trace), 1)


def _choose(
    generic: Result, hybrid: Result, homogeneous: Result | None, margin: float
) -> tuple[SchemeName, list[str]]:
    reasons = []
    refused = generic.refused / (len(generic.trace) + generic.refused)
    gain = _seconds(generic) / max(_seconds(hybrid), 1e-12) - 1
    if refused > REFUSED:
        reasons.append(
            f"the generic scheme cannot hold {generic.refused:,} of "
            f"{len(generic.trace) + generic.refused:,} requests: "
            f"{generic.server.scheme.block_bytes / BLOCK:,.0f} bytes a token, "
            f"{generic.server.room[Tier.DEVICE] / 1e9:.0f} GB beside the weights"
        )
    reasons.append(
        f"a request takes {1e3 * _seconds(generic):,.0f} ms of the devices under generic and "
        f"{1e3 * _seconds(hybrid):,.0f} under hybrid, {gain:+.1%} ({margin:.0%} are asked for); "
        f"reused tokens: {generic.hit_ratio:.1%} and {hybrid.hit_ratio:.1%} of "
        f"{hybrid.ideal_ratio:.1%}"
    )
    if refused <= REFUSED and gain < margin:
        return SchemeName.GENERIC, reasons
    chosen = SchemeName.HYBRID
    if homogeneous is not None:
        more = _seconds(hybrid) / max(_seconds(homogeneous), 1e-12) - 1
        size = _peak_bytes(homogeneous) / max(_peak_bytes(hybrid), 1.0)
        reasons.append(
            f"with a state in every page (homogeneous) it takes {1e3 * _seconds(homogeneous):,.0f} "
            f"ms, at {size:.1f} times the bytes"
        )
        if more >= margin:
            chosen = SchemeName.HOMOGENEOUS
    return chosen, reasons


def _conditions(
    hybrid: Result, load: Load, context: int | None, reuse: float | None, kept: float
) -> list[str]:
    where = "at no length up to 1M tokens" if context is None else f"from {context:,} tokens on"
    lines = [
        f"without reuse hybrid pays {where}; prompts here have {load.prompt:,.0f} on average, "
        f"answers {load.output:,.0f}, and {load.running:.1f} sequences decode together"
    ]
    if reuse is None:
        lines.append(
            "at this length no share of reuse makes up for it, as the generic scheme's tiers keep "
            f"{kept:.0%} of it too"
        )
    else:
        lines.append(
            f"at this length it pays from a reuse ratio of {reuse:.0%} on; here it is "
            f"{hybrid.ideal_ratio:.1%}"
        )
    if not hybrid.trace.shares:
        lines.append(
            "the trace does not say which prompts share a prefix: reuse is counted as none"
        )
    return lines


def _budget_lines(result: Result, budget: Budgets, disk: Mapping[str, float]) -> list[str]:
    parts = [f"{name} {size / 1e9:.1f} GB" for name, size in budget.by_tier.items() if size]
    lines = [
        f"{KEPT:.0%} of the reused tokens need {budget.blocks * BLOCK / 1e6:.2f} M tokens of "
        f"blocks and {budget.snapshots:,} snapshots, {budget.bytes / 1e9:.1f} GB: "
        + (", ".join(parts) or "nothing")
    ]
    if budget.missing:
        lines.append(f"{budget.missing / 1e9:.1f} GB of it fit no tier of this server")
    need = "is not needed for hits" if not budget.by_tier["disk"] else "must read"
    rate = disk["read_bytes_per_second"]
    lines.append(
        f"disk {need}"
        + (f" {rate / 1e9:.2f} GB/s at the busiest" if rate else "")
        + f"; to keep everything over a restart it takes {disk['bytes_to_keep_all'] / 1e9:.1f} GB, "
        f"written at up to {disk['write_bytes_per_second'] / 1e9:.2f} GB/s"
    )
    return lines
