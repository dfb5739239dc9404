"""Random traffic on tiny pools: after every event nothing is lost, and everything ends."""

import dataclasses
import functools

import numpy as np
from engines import FakeRestores, Lab, Time, make_engine, task_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scenarios.runs import CountingModel, assert_at_rest, tokens

from hybridkv.blocks.entries import Form
from hybridkv.engine.generated import Publish
from hybridkv.engine.requests import Finish
from hybridkv.engine.restores import RestoreState
from hybridkv.engine.scheduler import SchedulerOptions, Stage
from hybridkv.prefixes.policy import DEFAULT, DENSE, NEVER
from hybridkv.state.batch import StepOptions

BLOCKS, SLOTS, PER_SEQUENCE, SNAPSHOTS = 11, 3, 8, 3
HEADS = [tokens(5 * 16, seed) for seed in range(3)]
PARKED = 9472  # host bytes of one parked sequence of this geometry, nearly


@functools.cache
def the_lab() -> Lab:
    time = Time()
    sizes = {"blocks": BLOCKS, "slots": SLOTS, "per_sequence": PER_SEQUENCE}
    engine = make_engine(
        CountingModel(),
        StepOptions(tile=16, lanes=2),
        time=time,
        snapshots=SNAPSHOTS,
        **sizes,
    )
    return Lab(engine, time)


class FickleRestores(FakeRestores):
    """Begins some, ends them as they come: ready, failed, ready and late."""

    def begin(self, hold):
        number = len(self.tickets) + hold.chain.length
        self.after_s = (0.0, 0.3, 5.0)[number % 3]
        self.end = (RestoreState.READY, RestoreState.FAILED)[number % 2]
        return super().begin(hold) if number % 4 else None


class Traffic(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.lab = the_lab()
        self.lab.renew()
        self.engine, self.handles, self.ended = self.lab.engine, [], {}

    @initialize(
        budget=st.sampled_from([0, 40, 100]),
        park=st.sampled_from([0, 2 * PARKED, 1 << 20]),
        publish=st.sampled_from(Publish),
        restores=st.booleans(),
    )
    def begin(self, budget, park, publish, restores):
        self.lab.change(
            scheduler=SchedulerOptions(token_budget=budget, aging_s=8.0, patience_s=0.5),
            park_bytes=park,
            publish=publish,
            restores=FickleRestores(self.lab.time) if restores else None,
            restore_s=1.0,
        )

    @rule(
        head=st.integers(0, 2),
        shared=st.integers(0, 80),
        own=st.integers(1, 30),
        new=st.integers(1, 16),
        priority=st.integers(0, 2),
        samples=st.sampled_from([1, 1, 1, 3]),
        timeout=st.sampled_from([None, None, 0.5, 4.0]),
        policy=st.sampled_from([None, DEFAULT, DENSE, NEVER]),
        namespace=st.sampled_from(["", "", "other"]),
    )
    def submit(self, head, shared, own, new, priority, samples, timeout, policy, namespace):
        ids = np.concatenate([HEADS[head][:shared], tokens(own, own)])
        more = {"policy": policy, "namespace": namespace}
        self.handles.append(
            self.lab.submit(ids, new, priority=priority, samples=samples, timeout_s=timeout, **more)
        )

    @precondition(lambda self: any(h.done for h in self.handles))
    @rule(which=st.integers(0, 99), new=st.integers(1, 12))
    def next_turn(self, which, new):
        """A conversation goes on."""
        done = [h for h in self.handles if h.done]
        old = done[which % len(done)]
        request = task_of(old).request
        ids = np.concatenate([request.prompt, old.output.tokens, tokens(3, which)])
        if len(ids) + new <= PER_SEQUENCE * 16:
            ids = ids.astype(np.int32)
            self.handles.append(self.lab.submit(ids, new, namespace=request.namespace))

    @precondition(lambda self: self.handles)
    @rule(which=st.integers(0, 99))
    def cancel(self, which):
        handle = self.handles[which % len(self.handles)]
        running = not handle.done
        assert handle.cancel() == running
        assert handle.done
        assert not handle.cancel()

    @precondition(lambda self: self.engine.stages()[Stage.DECODING])
    @rule(count=st.integers(1, 3), blocks=st.integers(1, PER_SEQUENCE))
    def urgent(self, count, blocks):
        """More important ones come while others decode."""
        for number in range(count):
            ids = tokens(16 * blocks - 4, 200 + number)
            self.handles.append(self.lab.submit(ids, 3, priority=9))
        self.lab.steps(2)

    @precondition(lambda self: self.engine.stages()[Stage.PARKED])
    @rule()
    def damage(self):
        parked = next(t for t in self.engine._tasks.values() if t.parked is not None)
        parked.parked = dataclasses.replace(parked.parked, digest=b"")

    @rule(turns=st.integers(0, 3), count=st.integers(0, 3))
    def quiet_and_then_several(self, turns, count):
        """Idle work begins, and may be broken off."""
        for _ in range(200):
            if not self.engine.waiting:
                break
            self.engine.step()
            self.lab.time.now += 0.05
        self.lab.steps(turns)
        for number in range(count):
            self.handles.append(self.lab.submit(tokens(90, number), 16))
        self.lab.steps(1)

    @rule(turns=st.sampled_from([1, 1, 2, 5, 20]))
    def step(self, turns):
        self.lab.steps(turns)

    @rule(seconds=st.sampled_from([0.1, 0.5, 3.0, 20.0]))
    def wait(self, seconds):
        self.lab.time.now += seconds

    @rule()
    def evict_all(self):
        allocator = self.engine.runner.allocator
        allocator.evict(blocks=allocator.evictable(Form.BLOCK))

    @invariant()
    def what_is_held_is_what_somebody_holds(self):
        engine, runner = self.engine, self.engine.runner
        receipts, reserved, seated, parked = [], 0, [], 0
        sequences = [engine._idle._sequence] if engine._idle.holds_room else []
        for task in engine._tasks.values():
            held = [x is not None for x in (task.hold, task.sequence, task.parked)]
            stage = task.stage
            assert held == [
                stage is Stage.RESTORING,
                stage in (Stage.PREFILLING, Stage.DECODING),
                stage is Stage.PARKED,
            ]
            assert (task.ticket is not None) == (stage is Stage.RESTORING)
            if task.hold is not None:
                receipts += [task.hold.shared, task.hold.snapshot]
                reserved += 1
            if task.sequence is not None:
                sequences.append(task.sequence)
            if task.parked is not None:
                parked += task.parked.nbytes
        lengths = np.asarray(runner.cache.lengths)
        for sequence in sequences:
            receipts += [sequence.shared, sequence.own, *(r for _, r in sequence.stored)]
            seated.append(sequence.slot)
            assert lengths[sequence.slot] == sequence.computed
        assert len(set(seated)) == len(seated) == SLOTS - runner.free_slots
        assert runner.allocator.leases.open.keys() == {r.serial for r in receipts if r is not None}
        assert len(runner.allocator.reservations.left) == reserved
        assert parked == engine.seating.parked_bytes <= engine.options.park_bytes

    @invariant()
    def what_has_ended_stays_as_it_is(self):
        outputs = [output for handle in self.handles for output in handle.outputs]
        for number, output in enumerate(outputs):
            if output.finish is not None:
                state = output.finish, len(output.pieces)
                assert self.ended.setdefault(number, state) == state
        running = sum(output.finish is None for output in outputs)
        assert running == self.engine.waiting == len(self.engine._tasks)
        assert self.engine.counters.compilations == 0

    def teardown(self):
        """Everything ends within a bound, and the pools are as they were."""
        if not self.engine._tasks and not self.handles:
            return
        for _ in range(3000):
            if not self.engine.waiting:
                break
            self.engine.step()
            self.lab.time.now += 0.02
        assert not self.engine.waiting, self.engine.stages()
        for handle in self.handles:
            for output in handle.outputs:
                whole = len(output.pieces) == task_of(handle).request.max_new_tokens
                assert whole == (output.finish is Finish.LENGTH)
                assert output.finish is not Finish.FAILED
        self.engine.drain()
        assert_at_rest(self.engine.runner)
        self.evict_all()
        for form, count in ((Form.BLOCK, BLOCKS), (Form.SNAPSHOT, SNAPSHOTS)):
            assert self.engine.runner.allocator.available(form) == count
        assert self.engine.runner.free_slots == SLOTS
        self.lab.renew()


Traffic.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestTraffic = Traffic.TestCase
