r"""Seats: how requests come by one, lose it to others, and wait for what a restore brings.

    WAITING --admit--> seat, or behind a leader        seat --preempt--> WAITING (a prompt)
        \--admit--> RESTORING --poll, late--> WAITING      \--preempt--> PARKED --admit--> seat

Which task, and when, its caller decides; this carries it out on the caller's thread, which is the
runner's. Room is taken whole or not at all. Whatever a tier raises ends here: it is counted, and
the prompt is computed.
"""

from collections.abc import Callable, Iterable

import numpy as np

from hybridkv.blocks.entries import Form
from hybridkv.engine.choosing import SlotSampler
from hybridkv.engine.counters import EngineCounters
from hybridkv.engine.following import follow
from hybridkv.engine.holds import brought_blocks
from hybridkv.engine.options import EngineOptions
from hybridkv.engine.parking import ParkedBytesLost, park, parked_bytes, unpark
from hybridkv.engine.restores import Restores, RestoreState, RestoreTicket
from hybridkv.engine.runner import Runner
from hybridkv.engine.scheduler import FOREVER, Room, Stage
from hybridkv.engine.sequence import Hold, NoSlot, Sequence
from hybridkv.engine.task import Task
from hybridkv.prefixes.plan import has_loads

MOST_RESTORES = 3
"""Times that one request may have its prefix brought."""


class Seating:
    """Gives the tasks of one engine seats of one runner, and takes them away."""

    def __init__(
        self,
        runner: Runner,
        sampler: SlotSampler,
        *,
        options: EngineOptions,
        counters: EngineCounters,
        restores: Restores | None,
        clock: Callable[[], float],
    ) -> None:
        self._runner, self._sampler, self._clock = runner, sampler, clock
        self.options, self.counters = options, counters
        self.restores = restores
        """Brings prefixes from other tiers; None where there are none."""
        self.version = 0
        """Counts up whenever something is given back or published."""
        self.parked_bytes = 0
        """Host memory of what is parked."""

    # What there is.

    def room(self, *, idle_slots: int, count: bool) -> Room:
        """What is free.

        Args:
          idle_slots: slots beside the free ones that idle work would give up.
          count: count blocks too, which walks the entries; 0 otherwise.
        """
        runner, blocks = self._runner, 0
        if count:
            blocks = runner.allocator.available(Form.BLOCK) + runner.allocator.evictable(Form.BLOCK)
        return Room(
            slots=runner.free_slots + idle_slots,
            blocks=blocks,
            version=self.version,
            park_bytes=self.options.park_bytes - self.parked_bytes,
        )

    def park_bytes(self, task: Task) -> int:
        """Host memory that preempting it takes; a prompt starts over and takes none."""
        if task.stage is not Stage.DECODING or task.sequence is None:
            return 0
        return parked_bytes(self._runner, task.sequence.computed)

    # Who comes.

    def admit(self, task: Task, others: Iterable[Task]) -> None:
        """Seats a queued task, sends it restoring, or puts it behind one of ``others``.

        Raises:
          NoSlot, NoRoom, LeaseError: not now. It stays in the queue and holds nothing.
          UserError: it can never be seated.
        """
        if task.stage is Stage.PARKED:
            self._unpark(task)
        elif follow(task, others, self._runner):
            self.counters.followed += 1
        else:
            self._start(task)

    def _start(self, task: Task) -> None:
        runner, request = self._runner, task.request
        restores = None if task.restored else self.restores
        if not runner.free_slots and (restores is None or not self._would_load(task)):
            raise NoSlot("all slots are taken")  # before anything is evicted for it
        ours = restores is not None and restores is runner.mover
        hold = runner.hold(task.chain, tokens=task.room, namespace=request.namespace, loads=ours)
        if restores is not None:
            task.hold, task.ticket = hold, self._begin_restore(restores, hold)
            if task.ticket is not None:
                self._wait_for_restore(task, hold)
                return
            task.restored, task.hold = not ours or has_loads(hold.plan), None
            if task.restored and ours:
                runner.drop(hold)
                self._start(task)
                return
        task.hold = hold
        try:
            sequence = runner.seat(hold, policy=request.policy)
        except NoSlot:
            runner.drop(hold)
            task.hold = None
            raise
        self._seated(task, sequence, Stage.PREFILLING)
        self._count_plan(task, sequence)

    def _count_plan(self, task: Task, sequence: Sequence) -> None:
        output, counters = task.output, self.counters
        output.exact = output.exact and sequence.exact
        if output.plan is not None:  # what it finds when it starts over is its own work
            return
        output.plan = sequence.plan
        counters.reused_tokens += output.reused
        counters.replayed_tokens += output.replayed
        geometry = self._runner.model.geometry
        counters.prompts = counters.prompts.plus(sequence.plan, geometry, task.brought)

    def _seated(self, task: Task, sequence: Sequence, stage: Stage) -> None:
        task.hold, task.sequence, task.stage = None, sequence, stage
        if not task.output.preemptions:
            task.output.queued_s = self._clock() - task.arrived
        seen = (task.prompt, np.asarray(task.output.tokens, np.int32))
        self._sampler.seat(sequence.slot, task.sampling, seen)

    def _unpark(self, task: Task) -> None:
        assert task.parked is not None
        try:
            sequence = unpark(self._runner, task.parked)
        except ParkedBytesLost:
            self._recompute(task)
            return
        self.parked_bytes -= task.parked.nbytes
        task.parked = None
        self._seated(task, sequence, Stage.DECODING)

    def _recompute(self, task: Task) -> None:
        """Goes on without its state: all its tokens become a prompt, which changes bits."""
        assert task.parked is not None
        self.counters.lost_states += 1
        self.parked_bytes -= task.parked.nbytes
        task.parked, task.last = None, -1
        task.stage, task.output.exact = Stage.WAITING, False
        tokens = np.concatenate([task.prompt, np.asarray(task.output.tokens, np.int32)])
        task.chain = self._runner.chain(tokens, namespace=task.request.namespace)
        self._start(task)

    # Who goes.

    def preempt(self, task: Task) -> None:
        """Takes a seat away: what decodes is parked, a prompt starts over from its blocks."""
        assert task.sequence is not None
        if task.stage is Stage.PREFILLING:
            self._runner.finish(task.sequence)
            task.stage = Stage.WAITING
        else:
            task.parked = park(self._runner, task.sequence)
            self.keep_parked(task)
        # Not again behind its leader, which may have come to wait for this one.
        task.sequence = task.leader = None
        task.output.preemptions += 1
        self.counters.preemptions += 1
        self.version += 1

    def keep_parked(self, task: Task) -> None:
        """Queues a task that has ``parked`` bytes, which may come from another engine."""
        assert task.parked is not None
        self.parked_bytes += task.parked.nbytes
        task.stage = Stage.PARKED

    def give_back(self, task: Task) -> None:
        """Gives back what a task holds at whatever stage it is; its sequence has ended before."""
        if task.ticket is not None:
            task.ticket.cancel()
        if task.hold is not None:
            self._runner.drop(task.hold)
        if task.parked is not None:
            self.parked_bytes -= task.parked.nbytes
        task.hold = task.ticket = task.sequence = task.parked = task.leader = None
        self.version += 1

    # What other tiers bring.

    def look_ahead(self, task: Task) -> None:
        """Starts to read what a new task would load from disk."""
        try:
            self._runner.prefetch(task.chain, namespace=task.request.namespace)
        except Exception as error:  # whatever a tier does, the prompt can be computed
            self.counters.note_failed_restore(error)

    def turn_tiers(self, *, decode_seconds: float) -> None:
        """Lets the tiers get on; see ``Runner.turn``."""
        try:
            self._runner.turn(decode_seconds=decode_seconds)
        except Exception as error:  # as above
            self.counters.note_failed_restore(error)

    def poll(self, tasks: Iterable[Task]) -> None:
        """Sends back to the queue whose restore has ended."""
        for task in list(tasks):
            if task.stage is not Stage.RESTORING or task.ticket is None:
                continue
            state = self._restore_state(task.ticket)
            if state is not RestoreState.PENDING:
                # What is pushed out again before there is a slot may be brought once more.
                ours = self.restores is self._runner.mover and state is RestoreState.READY
                self._note_restore(task, state.value)
                if ours and task.hold is not None:
                    task.output.loaded += self._loaded_tokens(task.hold)
                    task.brought = task.coming
                self._stop_restoring(task, again=ours and task.restores < MOST_RESTORES)

    def late(self, task: Task) -> None:
        """Ends a restore that took too long: the task computes its prompt."""
        self.counters.late_restores += 1
        self._note_restore(task, "late")
        self._stop_restoring(task)

    def _would_load(self, task: Task) -> bool:
        """Whether a request without a slot has something to wait for meanwhile."""
        if self.restores is not self._runner.mover:
            return True
        plan = self._runner.plan(task.chain, namespace=task.request.namespace, loads=True)
        return has_loads(plan)

    def _begin_restore(self, restores: Restores, hold: Hold) -> RestoreTicket | None:
        try:
            return restores.begin(hold)
        except Exception as error:  # as above
            self.counters.note_failed_restore(error)
            return None

    def _wait_for_restore(self, task: Task, hold: Hold) -> None:
        task.restores += 1
        task.stage = Stage.RESTORING
        task.coming = task.brought.plus(self._runner.allocator.entries, hold.plan)
        task.restore_began = self._clock()
        task.restore_by = task.restore_began + self.options.restore_s
        self.counters.restores += 1

    def _restore_state(self, ticket: RestoreTicket) -> RestoreState:
        try:
            state = ticket.state()
        except Exception as error:  # as above
            self.counters.note_failed_restore(error)
            return RestoreState.FAILED
        self.counters.failed_restores += state is RestoreState.FAILED
        return state

    def _loaded_tokens(self, hold: Hold) -> int:
        blocks = brought_blocks(self._runner.allocator, hold.plan)
        return blocks * self._runner.model.geometry.block_tokens

    def _note_restore(self, task: Task, end: str) -> None:
        self.counters.restore_seconds[end].note(self._clock() - task.restore_began)

    def _stop_restoring(self, task: Task, *, again: bool = False) -> None:
        """Back to the queue with what there is now. Nothing runs between this and its admission."""
        task.restored = not again
        assert task.hold is not None
        if task.ticket is not None:
            task.ticket.cancel()
        self._runner.drop(task.hold)
        task.hold = task.ticket = None
        task.restore_by, task.stage = FOREVER, Stage.WAITING
        self.version += 1
