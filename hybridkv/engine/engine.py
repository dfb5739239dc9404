r"""Many requests over one runner: the scheduler says who, seating seats them, the runner computes.

    submit --> Task --arrange--> hold, seat --select--> tile and decode steps --> sample --> pieces
                          \--> park, restore, expire            \--> publish, give back

One thread calls an engine, and owns the cache by it. A turn (``step``) first settles who comes and
goes, then computes at most one decode step and the tiles that the token budget allows. Whatever
ends a request, at whatever stage, gives back all it held; an engine never ends of one request.
Nothing compiles after construction.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hybridkv.blocks.leases import LeaseError
from hybridkv.blocks.pools import NoRoom
from hybridkv.engine.choosing import SlotSampler
from hybridkv.engine.counters import EngineCounters
from hybridkv.engine.emission import last_text, take
from hybridkv.engine.generated import GeneratedUse, Publish
from hybridkv.engine.guard import CompileGuard, warming_up
from hybridkv.engine.handle import Handle
from hybridkv.engine.handoff import hand_off, resumption
from hybridkv.engine.idle import IdleCounters, IdlePublisher
from hybridkv.engine.intake import prompt_of, tasks_of
from hybridkv.engine.options import EngineOptions, RunnerOptions
from hybridkv.engine.probe import Probe, probe
from hybridkv.engine.protocol import StepModel
from hybridkv.engine.requests import Finish, Output, Request
from hybridkv.engine.restores import Restores
from hybridkv.engine.runner import Runner
from hybridkv.engine.scheduler import Stage, arrange, select
from hybridkv.engine.seating import Seating
from hybridkv.engine.sequence import NoSlot, Sequence
from hybridkv.engine.task import Task, Text
from hybridkv.errors import UserError
from hybridkv.prefixes.identity import Identity
from hybridkv.state.batch import StepOptions
from hybridkv.tiers.handoff_record import HandOff

__all__ = ["Engine", "EngineOptions"]


class Engine:
    """Runs requests together on one model: continuous batching with exact prefix reuse."""

    def __init__(
        self,
        model: StepModel,
        steps: StepOptions,
        sizes: RunnerOptions,
        options: EngineOptions = EngineOptions(),
        *,
        text: Text | None = None,
        restores: Restores | None = None,
        identity: Identity | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Allocates and compiles everything.

        Args:
          model: the model.
          steps: of its executables; ``all_logits`` is not used.
          sizes: of the pools, and policies.
          options: of the engine.
          text: tokenizer, for prompts, stops and outputs in text.
          restores: brings prefixes from other tiers.
          identity: what stored bytes depend on; computed where it is not given.
          clock: seconds; never goes back.
          sleep: called while everything there is waits for a restore.

        Raises:
          UserError: the device cannot address blocks of this model.
        """
        steps = dataclasses.replace(steps, all_logits=False)
        self.probe: Probe | None = None
        with warming_up():
            self.runner = Runner(model, steps, sizes, identity=identity, clock=clock)
            self._sampler = SlotSampler(
                vocab_size=model.vocab_size,
                slots=sizes.capacity.slots,
                lanes=steps.lanes,
                logprobs=options.logprobs,
            )
            if options.probe:
                self.probe, self.runner.cache = probe(self.runner.steps, self.runner.cache)
        self.seating = Seating(
            self.runner,
            self._sampler,
            options=options,
            counters=EngineCounters(),
            restores=restores or self.runner.mover,
            clock=clock,
        )
        self._text, self._clock, self._sleep = text, clock, sleep
        self._tasks: dict[int, Task] = {}
        self._next = 0
        self._decode_seconds = 0.0
        """Of the last turn's decode step; 0 where there was none."""
        self.on_turn: list[Callable[[], None]] = []
        """Told after each turn, on the engine's thread."""
        self.turn_lock = threading.Lock()
        """Held during a turn: between two, another thread may look at the books."""
        self._idle = IdlePublisher(self.runner)
        self._guard = CompileGuard(mode="raise" if options.strict else "count")
        self._guard.arm()

    @property
    def options(self) -> EngineOptions:
        """Choices; what is not compiled in may be replaced between two turns."""
        return self.seating.options

    @options.setter
    def options(self, options: EngineOptions) -> None:
        self.seating.options = options

    @property
    def counters(self) -> EngineCounters:
        """What it did; replace it to count anew."""
        return self.seating.counters

    @counters.setter
    def counters(self, counters: EngineCounters) -> None:
        self.seating.counters = counters

    # Requests.

    def submit(self, request: Request, *, driver: Callable[[], bool] | None = None) -> Handle:
        """Takes a request; it runs as the engine is stepped.

        Args:
          request: what is asked.
          driver: what the handle calls to get on, where more than this engine is to run.

        Raises:
          UserError: it is not one this model takes, or can never fit. Nothing was taken.
        """
        prompt = prompt_of(request, self.runner, self.options, self._text)
        self.runner.require_fits(len(prompt) + request.max_new_tokens)
        tasks = tasks_of(
            request,
            prompt,
            self.runner,
            self.options,
            self._text,
            first_id=self._next,
            clock=self._clock,
        )
        self._next += request.samples
        self._tasks |= {task.id: task for task in tasks}
        self.counters.submitted += len(tasks)
        self.seating.look_ahead(tasks[0])
        return Handle(tuple(tasks), driver=driver or self.step, cancel=self.cancel)

    def run(
        self, requests: Iterable[Request], *, progress: Callable[[Output], None] | None = None
    ) -> list[Output]:
        """Runs requests together to their ends; the outputs of all, in order.

        Args:
          requests: any number, none included.
          progress: told of each output when it is complete.

        Raises:
          UserError: one of them is refused; none was started.
        """
        handles: list[Handle] = []
        with contextlib.ExitStack() as refused:
            for request in requests:
                handles.append(self.submit(request))
                refused.callback(self.cancel, handles[-1])
            refused.pop_all()
        outputs = [output for handle in handles for output in handle.outputs]
        waiting = list(outputs)
        while waiting:
            self.step()
            ended = [output for output in waiting if output.finish is not None]
            waiting = [output for output in waiting if output.finish is None]
            for output in ended if progress is not None else ():
                assert progress is not None
                progress(output)
        return outputs

    def cancel(self, handle: Handle) -> bool:
        """Ends a request with what it has; False where it had ended before."""
        running = [task for task in handle.tasks if not task.ended]
        for task in running:
            self._end(task, Finish.CANCELLED)
        return bool(running)

    def hand_off(self, handle: Handle, *, sample: int = 0) -> HandOff:
        """Ends a request that decodes here, so that another engine goes on; see ``handoff``.

        Raises:
          HandOffRefused: it has no token yet or has ended. It goes on as it was.
        """
        task = handle.tasks[sample]
        handoff = hand_off(self.runner, task)
        self._end(task, Finish.HANDED_OFF)
        return handoff

    def take_over(
        self, handoff: HandOff, request: Request, *, driver: Callable[[], bool] | None = None
    ) -> Handle:
        """Goes on with a request that another engine handed off, with the bits of an unbroken one.

        Args:
          handoff: of an engine of the same identity.
          request: what was asked of its sender; ``Request(prompt=handoff.prompt, ...)``. The seed
            is that of the sample.
          driver: as in ``submit``.

        Returns:
          A handle whose output begins with the ``taken_over`` tokens that the sender chose, without
          their log-probabilities.

        Raises:
          HandOffRefused: it is not whole, or not for this engine or request. Nothing was taken.
          UserError: as ``submit``.
        """
        prompt = prompt_of(request, self.runner, self.options, self._text)
        resumed = resumption(self.runner, handoff, request, prompt, self._text)
        handle = self.submit(request, driver=driver)
        resumed.give(handle.tasks[0])
        self.seating.keep_parked(handle.tasks[0])
        return handle

    @property
    def waiting(self) -> int:
        """Outputs that are not complete."""
        return len(self._tasks)

    def stages(self) -> dict[Stage, int]:
        """How many requests are where."""
        counts = dict.fromkeys(Stage, 0)
        for task in list(self._tasks.values()):  # another thread may ask between two turns
            counts[task.stage] += 1
        return counts

    @property
    def idle_queued(self) -> int:
        """Requests whose generated tokens wait to be published."""
        return self._idle.queued

    @property
    def idle_counters(self) -> IdleCounters:
        """What canonical publishing did."""
        return self._idle.counters

    @property
    def generated_use(self) -> GeneratedUse:
        """What became of published blocks of generated tokens."""
        return self.runner.publisher.generated.use

    def drain(self) -> None:
        """Runs until every request has ended and all idle work is done."""
        while self._tasks or self._idle.pending:
            if not self.step() and not self._tasks:
                self._idle.clear()

    def reset(self) -> None:
        """Cancels everything and forgets every prefix."""
        for task in list(self._tasks.values()):
            self._end(task, Finish.CANCELLED)
        self._idle.clear()
        self.runner.reset()
        self._idle = IdlePublisher(self.runner)

    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Ends the engine: cancels what runs, and ends idle work and storing within a time.

        Returns whether all that was published is stored and the tiers have ended. Where a write is
        late, its store stays locked until that ends.
        """
        for task in list(self._tasks.values()):
            self._end(task, Finish.CANCELLED)
        end = time.monotonic() + timeout_s
        while self._idle.pending and time.monotonic() < end and self._idle.step():
            self.seating.turn_tiers(decode_seconds=self._decode_seconds)
        self._idle.clear()
        return self.runner.close(timeout_s=max(end - time.monotonic(), 0.0))

    # One turn.

    def step(self) -> bool:
        """One turn; False where there was nothing to compute."""
        with self.turn_lock:
            busy = self._turn()
        for tell in self.on_turn:
            tell()
        return busy

    def _turn(self) -> bool:
        now = self._clock()
        self.seating.turn_tiers(decode_seconds=self._decode_seconds)
        self._settle(now)
        lanes, tile = self._lanes, self.runner.options.tile
        work = select(self._jobs(), now, self.options.scheduler, lanes=lanes, tile=tile)
        for ids in work.tiles:
            self._tile([self._tasks[id_] for id_ in ids if id_ in self._tasks])
        # A prompt that just ended decodes from the next turn on.
        decoding = [self._tasks[id_] for id_ in work.decode if id_ in self._tasks]
        began = self._clock()
        self._decode(decoding)
        self._decode_seconds = self._clock() - began if decoding else 0.0
        busy = bool(work.tiles or work.decode)
        if not busy:
            busy = self._rest()
        self.counters.turns += busy
        self.counters.compilations += self._guard.check()
        return busy

    @property
    def _lanes(self) -> int:
        # A tile step's lanes are places and neighbours at once.
        exact = self.probe is None or self.probe.exact
        return self.runner.options.lanes if exact else 1

    def _jobs(self) -> list[Any]:
        block, tile = self.runner.model.geometry.block_tokens, self.runner.options.tile
        return [
            task.job(block_tokens=block, tile=tile, park_bytes=self.seating.park_bytes(task))
            for task in self._tasks.values()
        ]

    def _rest(self) -> bool:
        """A turn without requests to compute: idle work, or a little sleep until a restore ends."""
        restoring = any(task.stage is Stage.RESTORING for task in self._tasks.values())
        if (not self._tasks or restoring) and self._idle.step():
            return True
        if restoring:
            self._sleep(1e-3)
        return False

    # Who comes and who goes.

    def _settle(self, now: float) -> None:
        if not self._tasks:
            return
        self.seating.poll(self._tasks.values())
        jobs = self._jobs()
        queued = any(job.stage in (Stage.WAITING, Stage.PARKED) for job in jobs)
        room = self.seating.room(idle_slots=int(self._idle.holds_room), count=queued)
        arrangement = arrange(jobs, room, now, self.options.scheduler)
        for id_ in arrangement.expired:
            self._end(self._tasks[id_], Finish.TIMED_OUT)
        for id_ in arrangement.late:
            self.seating.late(self._tasks[id_])
        for id_ in arrangement.park:
            if id_ in self._tasks:
                self.seating.preempt(self._tasks[id_])
        for candidate in arrangement.admit:
            task = self._tasks.get(candidate.id)
            if task is None or task.follows:
                continue
            if not self._admit(task) and candidate.strict:
                break

    def _admit(self, task: Task) -> bool:
        """Lets a queued request in, if need be in the place of idle work; False where it waits."""
        for attempt in ("as it is", "without idle work"):
            try:
                self.seating.admit(task, self._tasks.values())
            except (NoSlot, NoRoom, LeaseError):
                if attempt == "as it is" and self._idle.holds_room:
                    self._idle.give_way()
                    continue
                task.refused_at = self.seating.version
                return False
            except UserError as error:
                self._end(task, Finish.FAILED, str(error))
            return True
        return False

    # What a turn computes.

    def _tile(self, tasks: list[Task]) -> None:
        tasks = [t for t in tasks if t.sequence is not None and t.sequence.tokens_left]
        if not tasks:
            return
        sequences = [task.sequence for task in tasks if task.sequence is not None]
        before = [sequence.computed for sequence in sequences]
        logits = self.runner.tiles(sequences)
        self.counters.tile_steps += 1
        ready = []
        for lane, (task, sequence) in enumerate(zip(tasks, sequences, strict=True)):
            count = sequence.computed - before[lane]
            task.output.computed += count
            self.counters.computed_tokens += count
            if not sequence.tokens_left:
                ready.append((lane, task))
            elif sequence.computed in sequence.forks:
                self.runner.publish(sequence)
                self.seating.version += 1
        if ready:
            self._finish_prompts(ready, logits)

    def _finish_prompts(self, ready: list[tuple[int, Task]], logits: Any) -> None:
        for _, task in ready:
            task.stage = Stage.DECODING
        self._choose(ready, logits)
        for _, task in ready:
            if task.sequence is not None:  # what ended here was published or refused by its end
                self.runner.publish(task.sequence)
                self.seating.version += 1

    def _decode(self, tasks: list[Task]) -> None:
        tasks = [t for t in tasks if t.stage is Stage.DECODING and t.sequence is not None]
        if not tasks:
            return
        together = self.probe is None or self.probe.neighbours_exact
        for group in [tasks] if together else [[task] for task in tasks]:
            tokens = {task.sequence: task.last for task in group if task.sequence is not None}
            logits = self.runner.advance(tokens)
            self.counters.decode_steps += 1
            for task in group:
                self._snapshot_as_decoded(task)
            rows = [(task.sequence.slot, task) for task in group if task.sequence is not None]
            self._choose(rows, logits)

    def _snapshot_as_decoded(self, task: Task) -> None:
        """Rows published as decoded need states to resume from; those pass by now or never."""
        sequence = task.sequence
        if task.output.publish is not Publish.AS_DECODED or sequence is None:
            return
        tile = self.runner.options.tile
        if self.runner.sizes.reuse and sequence.computed % tile == 0:
            self.runner.store_snapshot(sequence)

    def _choose(self, rows: list[tuple[int, Task]], logits: Any) -> None:
        """Samples the next token of each task from its row of logits."""
        slots = [(row, task.sequence.slot) for row, task in rows if task.sequence is not None]
        lengths = [task.sequence.computed for _, task in rows if task.sequence is not None]
        chosen = self._sampler.choose(logits, slots, lengths)
        if self.options.digests:
            values = np.asarray(logits)
            for row, task in rows:
                task.note_logits(values[row])
        for number, (_, task) in enumerate(rows):
            before, count = task.output.last_token_s, len(task.output.pieces)
            end = take(task, chosen, number, self._clock() - task.arrived)
            self.counters.new_tokens += end is None or end.finish is not Finish.FAILED
            if len(task.output.pieces) > count:
                self.counters.note_token(task.output, before)
            if end is not None:
                self._end(task, end.finish, end.reason)

    def _end(self, task: Task, finish: Finish, reason: str = "") -> None:
        """Ends a request at whatever stage it is, and gives back all it held."""
        if task.sequence is not None:
            self._leave(task, task.sequence, finish)
        self.seating.give_back(task)
        output = task.output
        output.finish, output.reason = finish, reason
        if finish not in (Finish.STOP, Finish.FAILED, Finish.HANDED_OFF):
            output.last_text = last_text(task)
        if task.digest is not None:
            output.logits_digest = task.digest.hexdigest()
        del self._tasks[task.id]
        self.counters.ended[finish] += 1

    def _leave(self, task: Task, sequence: Sequence, finish: Finish) -> None:
        generated = task.output.tokens
        if finish is Finish.FAILED:
            self.runner.release(sequence)  # nothing of it is trusted
            return
        if task.output.publish is Publish.AS_DECODED:
            self.runner.publish_as_decoded(sequence)
        self.runner.finish(sequence)
        done = finish in (Finish.LENGTH, Finish.STOP)
        if done and task.output.publish is Publish.CANONICAL and self.runner.sizes.reuse:
            self._idle.add(task.request.namespace, task.prompt, generated)
