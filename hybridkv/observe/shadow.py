r"""Shadow runs: which requests are run twice, on what, and what it means when the two differ.

    request --sampled? (a hash)--> served by one path, run beside by the other
                                        \------- both ended ------/
                                   tokens and SHA-256 of all logits: equal, bit for bit, or not

The cold run has an engine of its own that cannot reuse (``RunnerOptions.reuse`` off): it has no
directory entry to find, publishes nothing, and shares nothing with the engine that it checks but
the weights. It costs ``engine_bytes`` of device memory, and compiles the same steps once more.

How soon a fault is seen. Of requests whose bits a fault changes each is sampled with probability
``share``, independently; after n of them it is unseen with probability ``(1 - share)**n``. So
``requests_until_caught(share, p)`` of them suffice with probability p: the first one where share
is 1, 90 at 5 % and p = 0.99. Runs that are dropped count as not sampled: what holds in the end is
``RolloutCounters.coverage``.
"""

import dataclasses
import enum
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hybridkv.engine.engine import Engine
from hybridkv.engine.requests import Finish, Output
from hybridkv.engine.runner import RunnerOptions
from hybridkv.errors import UserError
from hybridkv.state import leaf
from hybridkv.state.cache import Cache
from hybridkv.state.capacity import Capacity
from hybridkv.state.snapshot import Snapshots

_DONE = (Finish.LENGTH, Finish.STOP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowOptions:
    """Which requests are run twice, and how little that may disturb.

    Raises:
      UserError: a value is out of its range.
    """

    share: float = 0.05
    """Of requests that could show a fault: in SHADOW of all, later of those that reuse serves."""
    salt: str = ""
    """Changes which ones; a secret, where clients must not know."""
    first_tokens: int = 0
    """Decide by so many first tokens of a prompt, so that the turns of one conversation fall
    together: then SHADOW finds what earlier turns left. 0 for all tokens, which makes every request
    a draw of its own. Must reach beyond what all prompts have in common."""
    concurrent: int = 2
    """Requests that are run twice at once; one more is dropped."""
    every: int = 8
    """An engine that serves nothing gets one turn after so many turns of those that serve: the
    bound on what shadow runs cost them. 0: only while those have nothing to compute."""
    longest_s: float = 120.0
    """Seconds after which a shadow run is given up."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UserError(f"a share of {self.share}: give 0 to 1")
        for name in ("first_tokens", "every"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}: give 0 or more")
        if self.concurrent < 1:
            raise UserError(f"{self.concurrent} shadow runs at once: give at least 1, or share=0")
        if not self.longest_s > 0:
            raise UserError(f"longest_s is {self.longest_s}: give more than 0")

    def sampled(self, namespace: str, tokens: np.ndarray) -> bool:
        """Whether a prompt is run twice; the same answer in every process and at any time."""
        return self.place("shadow", namespace, tokens) < self.share

    def place(self, purpose: str, namespace: str, tokens: np.ndarray) -> float:
        """Where a prompt stands among all, uniform in [0, 1). One that a share takes in, a larger
        share takes in too; for another purpose it stands elsewhere.

        Args:
          purpose: what is decided.
          namespace: of the request.
          tokens: integer ``[tokens]``.
        """
        digest = hashlib.sha256()
        for part in (purpose, self.salt, namespace):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        counted = tokens[: self.first_tokens] if self.first_tokens else tokens
        digest.update(np.ascontiguousarray(counted, "<i4").tobytes())
        return (int.from_bytes(digest.digest()[:8], "little") >> 11) * 2.0**-53


def requests_until_caught(share: float, probability: float = 0.99) -> int:
    """Affected requests after which one was sampled, with this probability at least.

    The least n with ``1 - (1 - share)**n >= probability``.

    Args:
      share: of requests that are run twice, in (0, 1].
      probability: in (0, 1).

    Raises:
      UserError: one of them is out of its range.
    """
    if not 0 < share <= 1:
        raise UserError(f"with a share of {share} nothing is ever caught: give above 0, at most 1")
    if not 0 < probability < 1:
        raise UserError(f"a probability of {probability}: give above 0 and below 1")
    if share == 1:
        return 1
    return math.ceil(math.log1p(-probability) / math.log1p(-share) - 1e-9)


def cold_sizes(sizes: RunnerOptions) -> RunnerOptions:
    """Sizes of an engine that checks one of ``sizes``: it reuses, publishes and keeps nothing.

    As many slots, so that its decode step has the same shape, and blocks for what runs in them.
    """
    capacity = sizes.capacity
    blocks = min(capacity.blocks, capacity.slots * capacity.blocks_per_sequence)
    return dataclasses.replace(
        sizes,
        capacity=dataclasses.replace(capacity, blocks=blocks),
        snapshots=0,
        reuse=False,
        ledger=False,
        tiers=None,
    )


def engine_bytes(geometry: Any, sizes: RunnerOptions) -> int:
    """Device bytes of an engine's own pools; weights are shared where the model object is."""
    capacity: Capacity = sizes.capacity
    pools = leaf.tree_bytes(Cache.declare(geometry, capacity))
    return pools + leaf.tree_bytes(Snapshots.declare(geometry, max(sizes.snapshots, 1)))


def require_comparable(reuse: Engine, cold: Engine) -> None:
    """Whether runs of two engines can be compared bit for bit.

    Raises:
      UserError: they cannot; the message says what to change.
    """
    if cold.runner.sizes.reuse:
        raise UserError(
            "the engine of cold runs can reuse: make it with cold_sizes(sizes), or reuse=False"
        )
    if not (reuse.options.digests and cold.options.digests):
        raise UserError("bits are compared by digests: make both engines with digests=True")
    if reuse.runner.identity != cold.runner.identity:
        raise UserError(
            "the engine of cold runs has another model or other steps, so that its bits differ: "
            "make it with the model and the StepOptions of the one that it checks"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Two runs of one request that should have been equal. Holds no token of it."""

    prompt: str
    """The first 16 digits of a SHA-256 of namespace and token ids."""
    prompt_tokens: int
    sample: int
    first_token: int | None
    """The first new token that differs, counted from 0; None where only logits do."""
    finishes: tuple[str, str]
    """Of the reuse path and of the cold run."""
    plan: str
    """How the reuse path began."""

    def __str__(self) -> str:
        what = "only logits differ"
        if self.first_token is not None:
            what = f"new token {self.first_token} differs"
        if self.finishes[0] != self.finishes[1]:
            what += " ({} where the cold run is {})".format(*self.finishes)
        return f"request {self.prompt} of {self.prompt_tokens} tokens: {what}; {self.plan}"


class Verdict(enum.Enum):
    """What a comparison says, where it finds no mismatch."""

    EQUAL = "equal"
    INEXACT = "inexact"
    """An output says itself that its bits are not those of an unbroken cold run."""
    INCOMPLETE = "incomplete"
    """One of them ended early, other than by a failure that the cold run has not."""


def compare(
    reuse: Sequence[Output], cold: Sequence[Output], *, namespace: str, tokens: np.ndarray
) -> Mismatch | Verdict:
    """Whether two runs of a request gave the same tokens from the same logits.

    Args:
      reuse: outputs of the reuse path, which have ended.
      cold: of the cold run.
      namespace: of the request.
      tokens: its prompt, integer ``[tokens]``.

    Returns:
      The first mismatch, or what else there is to say.
    """
    said = Verdict.EQUAL
    for number, (one, other) in enumerate(zip(reuse, cold, strict=True)):
        failed = one.finish is Finish.FAILED and other.finish in _DONE
        if not failed and not (one.finish in _DONE and other.finish in _DONE):
            return Verdict.INCOMPLETE
        if not (failed or (one.exact and other.exact)):
            said = Verdict.INEXACT
            continue
        same = one.tokens == other.tokens and one.logits_digest == other.logits_digest
        if failed or not same or one.finish is not other.finish or one.logits_digest is None:
            return _mismatch(one, other, number, namespace, tokens)
    return said


def _mismatch(
    one: Output, other: Output, number: int, namespace: str, tokens: np.ndarray
) -> Mismatch:
    digest = hashlib.sha256(namespace.encode() + b"\0")
    digest.update(np.ascontiguousarray(tokens, "<i4").tobytes())
    ended = [x.finish.value if x.finish else "runs" for x in (one, other)]
    return Mismatch(
        prompt=digest.hexdigest()[:16],
        prompt_tokens=one.prompt_tokens,
        sample=number,
        first_token=_first_difference(one.tokens, other.tokens),
        finishes=(ended[0], ended[1]),
        plan=one.plan.explain() if one.plan is not None else "it never began",
    )


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return number
    return None if len(one) == len(other) else min(len(one), len(other))
