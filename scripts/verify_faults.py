"""An engine at work while its tiers fail: the ``faults`` check of ``verify.py``.

    for each point, each sensible fault, some times: a store with prefixes --> one schedule
      requests that load, that are new, that share; then again from the host; evictions, compaction,
      a hand-off through a file; at the end everything at rest
    reopened without faults: the same requests, and a store that is whole or says what is not

Every output is compared with that of a cold run: tokens, and the digest of all logits. Faults are
injected at the points of ``hybridkv.tiers.faults``; a crash is ``verify_crash``'s. ``flips`` and
``folders`` damage what lies on disk: each byte that was turned must be found, and no folder ends an
engine. The toy model; one process, one compiled engine.
"""

import collections
import dataclasses
import logging
import pathlib
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import command_line
import fault_folders
import fault_reports
from fault_lab import WAIT_S, Lab

from hybridkv.blocks.entries import Tier
from hybridkv.errors import UserError
from hybridkv.tiers.faults import SENSIBLE, Fault, Planned, Point, Schedule
from hybridkv.tiers.handoff_record import HandOff, HandOffRefused
from hybridkv.tiers.mover import Mover
from hybridkv.tiers.store.records import ProblemKind
from hybridkv.tiers.storing import PAUSE_S

BUDGET_S = 200
"""Seconds that the check takes on two quiet cores, about."""
SILENT = frozenset({Fault.FLIPPED_BIT, Fault.LOST_FILE})
"""At COMMITTED these change the store behind its writer's back: nobody can prevent what they do,
so the store must say it."""


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What one schedule came to."""

    planned: tuple[Planned, ...]
    wrong: list[str] = dataclasses.field(default_factory=list)
    outputs: int = 0
    seconds: float = 0.0
    reached: collections.Counter[Point] = dataclasses.field(default_factory=collections.Counter)
    missed: tuple[Planned, ...] = ()
    told: int = 0
    """Failures that counters or the store's problems tell of."""
    problems: int = 0
    """What ``verify`` of the store said at the end."""
    error: str = ""
    """The last line that the tiers gave."""


def make_template(lab: Lab, path: pathlib.Path, names: Sequence[str] = ("first", "tenant")) -> None:
    """A store with the prefixes of conversations."""
    lab.attach(lab.options(path))
    wrong = [line for name in names for line in lab.ask(name)]
    if not lab.flush() or wrong:
        raise UserError(f"the store to begin with could not be made: {wrong}")
    lab.detach()


class Trial:
    """One schedule over one copy of the template."""

    def __init__(self, lab: Lab, path: pathlib.Path, faults: Schedule) -> None:
        self.lab, self.path, self.faults = lab, path, faults
        self.outcome = Outcome(planned=faults.missed)

    def run(self) -> Outcome:
        """All phases; whatever any of them raises is a failure of the library."""
        outcome, began = self.outcome, time.perf_counter()
        try:
            self._at_work()
            self._after_restart()
        except Exception as error:  # the trial is over, and this is what it found
            outcome.wrong.append(f"{type(error).__name__}: {error}")
            self._start_anew()
        outcome.seconds = time.perf_counter() - began
        outcome.reached, outcome.missed = self.faults.reached, self.faults.missed
        return outcome

    def _ask(self, *names: str) -> None:
        self.outcome.wrong += self.lab.ask(*names)
        self.outcome.outputs += len(names)

    def _rest(self, when: str) -> None:
        self.outcome.wrong += [f"{when}: {line}" for line in self.lab.held()]

    def _at_work(self) -> None:
        lab = self.lab
        lab.attach(lab.options(self.path, self.faults))
        alone = lab.submit("alone")  # decodes while the others load
        lab.until("the first tokens come", lambda: bool(alone.output.pieces))
        handles = {name: lab.submit(name) for name in ("first", "fork", "tenant")}
        self.outcome.wrong += lab.finish({"alone": alone, **handles})
        self.outcome.outputs += 4
        lab.flush()
        lab.forget(Tier.DEVICE)
        self._ask("first", "alone")  # from the host
        lab.clock.added += 2 * PAUSE_S  # what failed is tried again
        self._ask("fork", "alone")
        lab.flush()
        self._rest("at work")
        lab.forget(Tier.DEVICE, Tier.HOST)
        self._ask("fork", "first")  # from the disk
        lab.forget(Tier.DISK, blocks=4)
        lab.flush()
        self._compact()
        lab.forget(Tier.DEVICE, Tier.HOST)
        self._ask("first", "tenant")
        self._hand_off("alone")
        lab.clock.added += 2 * PAUSE_S
        lab.flush()
        self._rest("at the end")
        mover = lab.mover
        lab.detach()
        self._tell(mover)

    def _compact(self) -> None:
        """On the writer's thread, as a tool would."""
        mover = self.lab.mover
        if mover.store is None:
            return
        future = mover._writer.submit(mover.store.compact)
        error = future.exception(WAIT_S)
        if error is not None:
            mover.counters.note_failed_store(Tier.DISK, error)

    def _hand_off(self, name: str) -> None:
        """Through a file; a sender that is refused goes on itself from its own copy."""
        lab, file = self.lab, self.path.parent / "handoff"
        handle = lab.submit(name)
        lab.until("it decodes", lambda: len(handle.output.pieces) >= 2)
        handoff = lab.engine.hand_off(handle)
        try:
            handoff.write(file, faults=self.faults)
            handoff = HandOff.read(file, faults=self.faults)
        except HandOffRefused as refused:
            self.outcome.told += 1
            self.outcome.error = str(refused)
        again = lab.engine.take_over(handoff, lab.request(lab.talks[name]))
        lab.until("it is taken over", lambda: again.done)
        self.outcome.wrong += lab.differs(name, again, logits=False)
        self.outcome.outputs += 1

    def _tell(self, mover: Mover) -> None:
        """Of a mover that is closed: what was under way then is told too."""
        counters, store, outcome = mover.counters, mover.store, self.outcome
        outcome.told += counters.failed_loads + sum(counters.failed_stores.values())
        outcome.told += counters.failed_prefetches
        outcome.told += sum(counters.spoiled.values()) + bool(mover.unusable)
        outcome.told += len(store.problems) if store is not None else 0
        outcome.error = counters.last_error or mover.unusable or outcome.error

    def _after_restart(self) -> None:
        lab, outcome = self.lab, self.outcome
        lab.attach(lab.options(self.path))
        self._ask("first", "fork", "tenant", "alone")
        lab.flush()
        self._rest("after a restart")
        store = lab.mover.store
        if store is None:
            outcome.told += 1
            allowed = any(p.fault in SILENT | {Fault.SHORT_READ} for p in outcome.planned)
            outcome.wrong += [] if allowed else [f"no store: {lab.mover.unusable}"]
        else:
            problems = store.verify()
            outcome.problems = len(problems)
            outcome.told += len(problems)
            damaged = any(p.point is Point.COMMITTED and p.fault in SILENT for p in outcome.planned)
            # Who could not read a manifest for a while may store some of its blocks once more.
            twice = any(p.point is Point.READ_MANIFEST for p in outcome.planned)
            lost = any(p.fault is Fault.LOST_FILE for p in outcome.planned)
            kinds = [ProblemKind.DUPLICATE] * twice + [ProblemKind.MISSING] * lost
            wrong = [] if damaged else [x for x in problems if x.kind not in kinds]
            outcome.wrong += [f"in the store: {problem}" for problem in wrong[:3]]
        lab.detach()

    def _start_anew(self) -> None:
        """Whatever a trial left behind ends with it."""
        try:
            self.lab.attach(None)
        except Exception as error:  # told beside what ended the trial
            self.outcome.wrong.append(f"the end of it: {type(error).__name__}: {error}")
            self.lab.engine.runner.mover = self.lab.engine.seating.restores = None
            self.lab.attach(None)


MUST_TELL = frozenset(Fault) - {Fault.DELAY, Fault.CRASH}
_NOT_KNOWN = frozenset(
    {
        (Point.READ_MANIFEST, Fault.LOST_FILE),  # as if it had never been there
        (Point.COMMITTED, Fault.LOST_FILE),
        (Point.HOST_STORE, Fault.FLIPPED_BIT),  # told when it is read, if it ever is
    }
)


def schedules(reached: collections.Counter[Point]) -> Iterator[tuple[Planned, ...]]:
    """Each point with each fault that is sensible there, the first time it comes and a late one.

    How often a point comes depends a little on how threads meet, so the last time is left out.
    """
    for point, faults in SENSIBLE.items():
        for fault in sorted(faults - {Fault.CRASH}, key=lambda x: x.value):
            late = 1 if fault is Fault.DELAY else max(2 * reached[point] // 3, 1)
            for nth in sorted({1, late}):
                yield (Planned(point=point, fault=fault, nth=nth),)


def storm(rng: random.Random, reached: collections.Counter[Point]) -> tuple[Planned, ...]:
    """Several faults at random times of one run."""
    found = {}
    for _ in range(rng.randint(3, 12)):
        point = rng.choice(list(SENSIBLE))
        fault = rng.choice(sorted(SENSIBLE[point] - {Fault.CRASH}, key=lambda x: x.value))
        nth = rng.randint(1, max(reached[point], 1))
        found[point, nth] = Planned(point=point, fault=fault, nth=nth)
    return tuple(found.values())


def faults(
    lab: Lab,
    root: pathlib.Path,
    *,
    budget_s: float,
    seed: int,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Outcome]:
    """One run without faults, one for each schedule, then storms until the budget is spent.

    Args:
      lab: the engine.
      root: an empty folder.
      budget_s: seconds; all single faults are tried in any case, and two storms.
      seed: of the storms.
      progress: told what comes next.
    """
    end, rng = time.monotonic() + budget_s, random.Random(seed)
    make_template(lab, root / "template")

    def run(planned: Sequence[Planned]) -> Outcome:
        progress(", ".join(f"{x.fault.value} at {x.point.value} {x.nth}" for x in planned))
        path = root / "store"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(root / "template", path)
        return Trial(lab, path, Schedule(planned)).run()

    outcomes = [run(())]
    reached = outcomes[0].reached
    never = [point.name for point in Point if not reached[point]]
    outcomes[0].wrong += [f"{name} was never reached" for name in never]
    for planned in schedules(reached):
        outcomes.append(run(planned))
        outcomes[-1].wrong += _single(outcomes[-1])
    storms = 0
    while storms < 2 or time.monotonic() < end:
        outcomes.append(run(storm(rng, reached)))
        storms += 1
    return outcomes


def _single(outcome: Outcome) -> list[str]:
    """What has to hold where there is one fault: it happened, and something tells of it."""
    (one,) = outcome.planned
    if outcome.missed:
        return [f"{one.point.name} was not reached {one.nth} times"]
    silent = one.fault not in MUST_TELL or (one.point, one.fault) in _NOT_KNOWN
    return [] if silent or outcome.told else ["nothing tells of it"]


def verify(root: pathlib.Path, *, budget_s: float, seed: int) -> tuple[bool, dict[str, Any]]:
    """The ``faults`` check: whether all is right, and the result."""
    end = time.monotonic() + budget_s
    logging.getLogger("hybridkv").setLevel(logging.ERROR)  # the tables have its lines
    with fault_reports.progress("faults") as tell:
        lab = Lab()
        make_template(lab, root / "whole")
        cases = fault_folders.folders(lab, root / "whole", root / "folders")
        turned = fault_folders.flips(lab, root / "whole", root / "turned", tell)
        outcomes = faults(lab, root, budget_s=end - time.monotonic(), seed=seed, progress=tell)
    rows = _print(outcomes)
    flip_rows = fault_reports.grouped(
        "one byte of each file of a store turned, one file at a time",
        ["file", "turned", "found", "outputs", "wrong"],
        [(_sort(x.name), (1, bool(x.line), 3, bool(x.wrong))) for x in turned],
    )
    command_line.print_table(
        "folders that are no whole stores, or cease to be",
        ["folder", "ok", "what is said"],
        [(x.name, "NO" if x.wrong else "yes", _without(root, x.line)) for x in cases],
    )
    found: list[tuple[str, fault_reports.Finding]] = [(_name(x), x) for x in outcomes]
    found += [(case.name, case) for case in (*turned, *cases)]
    fault_reports.print_wrong(found)
    wrong = [f"{name}: {line}" for name, each in found for line in each.wrong]
    reached = {point.value: outcomes[0].reached[point] for point in Point}
    result = {
        "schedules": len(outcomes),
        "faults": sum(len(x.planned) - len(x.missed) for x in outcomes),
        "outputs": sum(x.outputs for x in outcomes),
        "wrong": wrong,
        "rows": rows,
        "reached without faults": reached,
        "turned": flip_rows,
        "folders": {x.name: _without(root, x.line) for x in cases},
    }
    return not wrong, result


def _print(outcomes: Sequence[Outcome]) -> list[dict[str, int | str]]:
    single = [x for x in outcomes if len(x.planned) == 1]
    columns = ["point", "faults", "outputs", "told", "missed", "wrong"]
    rows = [
        (
            x.planned[0].point.value if x in single else "several" if x.planned else "none",
            (
                len(x.planned) - len(x.missed),
                x.outputs,
                bool(x.told),
                len(x.missed) if x in single else 0,
                bool(x.wrong),
            ),
        )
        for x in outcomes
    ]
    return fault_reports.grouped(
        "an engine at work while its tiers fail, and after a restart", columns, rows
    )


def _name(outcome: Outcome) -> str:
    names = (f"{x.fault.value} at {x.point.value} {x.nth}" for x in outcome.planned)
    return ", ".join(names) or "no fault"


def _sort(name: str) -> str:
    """What a file of a store is, without ids."""
    first, *rest = name.split("/")
    return "/".join([first, "*", *rest[1:]]) if rest else name


def _without(root: pathlib.Path, line: str) -> str:
    return line.replace(f"{root}/", "")
