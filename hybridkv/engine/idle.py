r"""Canonical publishing: tile steps make the rows of generated tokens again, in idle time.

    request ends --> queue of token sequences --one tile an idle turn--> published blocks, snapshot
                                         \--given up at once when a prompt needs slot or room

Nothing here goes ahead of an admitted prompt. What is given up half-way is published up to its last
whole block, and goes on from there when the engine is idle again.
"""

import collections
import dataclasses

import numpy as np

from hybridkv.arithmetic import round_down
from hybridkv.blocks.pools import NoRoom
from hybridkv.engine.runner import Runner
from hybridkv.engine.sequence import Sequence
from hybridkv.errors import UserError


@dataclasses.dataclass(kw_only=True)
class IdleCounters:
    """What canonical publishing did; tokens."""

    queued: int = 0
    computed: int = 0
    interruptions: int = 0
    overtaken: int = 0
    """Jobs whose tokens a prompt had computed before their turn came."""
    dropped: int = 0
    """Jobs that were never done: the queue was full, or they no longer fitted."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Job:
    namespace: str
    tokens: np.ndarray
    prompt_tokens: int


class IdlePublisher:
    """Publishes generated tokens for one runner, one tile a call."""

    def __init__(self, runner: Runner, *, longest_queue: int = 256) -> None:
        self.counters = IdleCounters()
        self._runner = runner
        self._longest = longest_queue
        self._queue: collections.deque[_Job] = collections.deque()
        self._job: _Job | None = None
        self._sequence: Sequence | None = None

    @property
    def pending(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._queue) or self._sequence is not None

    @property
    def queued(self) -> int:
        """Requests whose tokens wait to be computed again, the one at hand included."""
        return len(self._queue) + (self._sequence is not None)

    @property
    def holds_room(self) -> bool:
        """Whether ``give_way`` would free a slot and blocks."""
        return self._sequence is not None

    def add(self, namespace: str, prompt: np.ndarray, generated: list[int]) -> None:
        """Queues a request's tokens, if they fill a tile that its prompt did not."""
        tile = self._runner.options.tile
        whole = round_down(len(prompt) + len(generated), tile)
        if whole <= round_down(len(prompt), tile):
            return
        tokens = np.concatenate([prompt.astype(np.int64), np.asarray(generated, np.int64)])
        job = _Job(namespace=namespace, tokens=tokens[:whole], prompt_tokens=len(prompt))
        self._queue.append(job)
        self.counters.queued += whole - len(prompt)
        while len(self._queue) > self._longest:
            self._queue.popleft()
            self.counters.dropped += 1

    def step(self) -> bool:
        """Computes one tile; False where nothing could be done."""
        if self._sequence is None and not self._begin():
            return False
        sequence = self._sequence
        assert sequence is not None
        before = sequence.computed
        self._runner.tile(sequence)
        self.counters.computed += sequence.computed - before
        if not sequence.tokens_left:
            self._runner.finish(sequence)
            self._sequence = self._job = None
        return True

    def give_way(self) -> None:
        """Frees slot and room at once; the job stays the next one."""
        if self._sequence is None:
            return
        self._runner.finish(self._sequence)
        assert self._job is not None
        self._queue.appendleft(self._job)
        self._sequence = self._job = None
        self.counters.interruptions += 1

    def clear(self) -> None:
        """Forgets everything that is queued."""
        self.give_way()
        self._queue.clear()

    def _begin(self) -> bool:
        if not self._queue or not self._runner.free_slots:
            return False
        job = self._queue.popleft()
        chain = self._runner.chain(job.tokens, namespace=job.namespace)
        if len(self._runner.directory.find(chain).entries) == chain.blocks:
            self.counters.overtaken += 1  # a prompt that went on from it came first
            return self._begin()
        try:
            hold = self._runner.hold(chain, tokens=len(job.tokens), namespace=job.namespace)
        except (NoRoom, UserError):
            self.counters.dropped += 1
            return self._begin()
        self._sequence = self._runner.seat(hold, generated_from=job.prompt_tokens)
        self._job = job
        return True
