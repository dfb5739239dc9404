"""A writer that is killed anywhere, and what the next process finds: ``verify.py crash``.

    recorded extensions --writer process, SIGKILL at one point--> a folder as it was left
        reader: everything of a commit or nothing
        engine: tidied, each prefix found gives the bits of a cold run, the next store succeeds

The writer is a process without a model that commits, removes and compacts what an engine stored
before; it forks for each crash, so that imports are paid once. Some crashes are of a whole engine
at work, and some come at no point in particular but after a while. ``serve`` and ``engine`` are the
modes of the writing processes.
"""

import collections
import dataclasses
import json
import os
import pathlib
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hybridkv.blocks.entries import Tier
from hybridkv.tiers.faults import Fault, Planned, Point, Schedule
from hybridkv.tiers.store import Store
from hybridkv.tiers.store.records import Extension

WRITES = (
    Point.LOCK,
    Point.OPEN,
    Point.LIST,
    Point.WRITE_SEGMENT,
    Point.WRITE_SNAPSHOT,
    Point.WRITE_MANIFEST,
    Point.COMMITTED,
    Point.READ_SEGMENT,
    Point.COMPACT,
    Point.DELETE,
)
"""Where a writer is killed, each time it comes there."""
ENGINE = (
    (Point.WRITE_MANIFEST, 2),
    (Point.DEVICE_WRITE, 2),
    (Point.DISK_STORE, 2),
    (Point.HOST_STORE, 9),
    (Point.DELETE, 2),
    (Point.DISK_LOAD, 3),
    (Point.HOST_LOAD, 2),
    (Point.PREFETCH, 1),
    (Point.HANDOFF_EXPORT, 1),
)
"""Where a whole engine is killed, the most telling first."""
_KEPT = 2
"""Blocks of the first extension that outlive the removal; fewer than half of its segment."""
_HANG_S = 60.0
BUDGET_S = 180
"""Seconds that the check takes on two quiet cores, about."""


# What a writer does, as values that fit in one file.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One change of a store: ``commit``, ``remove`` or ``compact``."""

    what: str
    gone: tuple[frozenset[bytes], frozenset[bytes]] = (frozenset(), frozenset())
    """Digests of blocks, and of blocks that snapshots stand on, that are removed."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Commit(Step):
    """An extension with its words."""

    extension: Extension
    blocks: list[np.ndarray]
    snapshots: list[np.ndarray]


State = tuple[frozenset[bytes], frozenset[bytes]]
"""Digests of the blocks, and of the blocks under the snapshots, that can be found."""


def record(path: pathlib.Path) -> list[Step]:
    """What it takes to make a store's extensions, take most of them away and make them again."""
    commits: list[Commit] = []
    with Store.open_as_is(path) as store:
        for stored in store.extensions():
            rows = dict(store.read_segments(dict.fromkeys(x.segment for x in stored.blocks)))
            commits.append(
                Commit(
                    what="commit",
                    extension=stored.extension,
                    blocks=[rows[x.segment][x.index] for x in stored.blocks],
                    snapshots=[store.read_snapshot(x) for x in stored.snapshot_ids],
                )
            )
    # Parents first; the longest of those without one is taken most of.
    commits.sort(key=lambda x: (x.extension.first, -x.extension.blocks, x.extension.root))
    first, *others = (step.extension for step in commits)
    blocks = {d.tobytes() for x in others for d in x.digests if x.root == first.root}
    blocks |= {first.digest(i) for i in range(_KEPT, first.blocks)}
    under = {at.digest for x in (first, *others) for at in x.snapshots if at.digest in blocks}
    removal = Step(what="remove", gone=(frozenset(blocks), frozenset(under)))
    return [*commits, removal, Step(what="compact"), *commits]


def states(steps: Sequence[Step]) -> list[State]:
    """What can be found before the first step, and after each."""
    blocks: set[bytes] = set()
    snapshots: set[bytes] = set()
    found = [(frozenset(blocks), frozenset(snapshots))]
    for step in steps:
        if isinstance(step, Commit):
            blocks |= {step.extension.digest(i) for i in range(step.extension.blocks)}
            snapshots |= {at.digest for at in step.extension.snapshots}
        blocks -= step.gone[0]
        snapshots -= step.gone[1]
        found.append((frozenset(blocks), frozenset(snapshots)))
    return found


def state_of(store: Store) -> State:
    """What can be found in a store."""
    inner = [stored.extension for stored in store.extensions()]
    blocks = {x.digest(i) for x in inner for i in range(x.blocks)}
    return frozenset(blocks), frozenset(at.digest for x in inner for at in x.snapshots)


def do(store: Store, step: Step) -> None:
    """One step on a store."""
    if isinstance(step, Commit):
        store.commit(step.extension, step.blocks, step.snapshots)
    elif step.what == "remove":
        places = [store.find(digest) for digest in step.gone[0]]
        names = [store.find_snapshot(digest) for digest in step.gone[1]]
        store.remove([x for x in places if x is not None], [x for x in names if x is not None])
    else:
        store.compact()


def run(path: pathlib.Path, origin: pathlib.Path, faults: Schedule, done: Callable[[], Any]) -> int:
    """All steps in a new store like the one at ``origin``; how many were done."""
    steps = record(origin)
    with Store.open_as_is(origin) as like:
        identity, layout = like.identity, like.layout
    with Store.open(path, identity=identity, layout=layout, faults=faults) as store:
        for step in steps:
            do(store, step)
            done()
    return len(steps)


# The writing processes.


def serve(origin: pathlib.Path) -> None:
    """Reads a crash a line from standard input; a child does all steps until it is killed."""
    from orbax.checkpoint import v1 as ocp  # noqa: F401 - once for all children

    print("{}", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            _child(order, origin, writing)
        os.close(writing)
        answer = _watch(child, reading, order.get("after_s"))
        print(json.dumps(answer), flush=True)


def _child(order: dict[str, Any], origin: pathlib.Path, pipe: int) -> None:
    planned = []
    if order.get("point"):
        point, nth = Point(order["point"]), order["nth"]
        planned = [Planned(point=point, fault=Fault.CRASH, nth=nth)]
    faults = Schedule(planned)
    try:
        run(pathlib.Path(order["path"]), origin, faults, lambda: os.write(pipe, b"."))
        reached = {point.value: count for point, count in faults.reached.items()}
        os.write(pipe, json.dumps(reached).encode())
        os._exit(0)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)


def _watch(child: int, pipe: int, after_s: float | None) -> dict[str, Any]:
    """Waits for a child, which is killed after a while if that was asked; how far it came."""
    said, end = b"", time.monotonic() + (_HANG_S if after_s is None else after_s)
    killed = False
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
        part = os.read(pipe, 1 << 16) if ready else b""
        said += part
        if ready and not part:
            break
        if not ready and not killed:
            os.kill(child, signal.SIGKILL)
            killed = True
    os.close(pipe)
    _, status = os.waitpid(child, 0)
    dots = said.split(b"{")[0]
    answer = {"done": len(dots), "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}
    answer["hung"] = killed and after_s is None
    if len(dots) < len(said):
        answer["reached"] = json.loads(said[len(dots) :])
    return answer


class WriterProcess:
    """The server of crashes, at work in another process."""

    def __init__(self, origin: pathlib.Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "serve", str(origin)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the writing process ended")
        return json.loads(line)

    def crash(self, path: pathlib.Path, **order: Any) -> Any:
        """Runs all steps in a new store until the crash."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"path": str(path), **order}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_HANG_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


def engine_at_work(template: pathlib.Path, path: pathlib.Path, point: Point, nth: int) -> None:
    """A whole engine that stores, loads and evicts, until it is killed."""
    import command_line
    from fault_lab import Lab
    from verify_faults import Trial

    command_line.use_compilation_cache()
    lab = Lab()
    shutil.copytree(template, path)
    faults = Schedule([Planned(point=point, fault=Fault.CRASH, nth=nth)])
    outcome = Trial(lab, path, faults).run()
    print(f"{point.name} {nth} was not reached: {outcome.wrong}", file=sys.stderr)


# The verifying process.


@dataclasses.dataclass(kw_only=True)
class Crash:
    """One crash and what was found after it."""

    where: str
    nth: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    blocks: int = 0
    """That were found."""
    loaded: int = 0
    """Entries that came from the disk to the device."""
    stored: int = 0
    """Entries that the next process stored."""


class Verifier:
    """Reopens what crashes left."""

    def __init__(self, lab: Any, root: pathlib.Path, seed: int) -> None:
        """Makes the recording, its steps and the states after each."""
        from verify_faults import make_template

        self.lab, self.root = lab, root
        self.random = random.Random(seed)
        self.template, self.origin = root / "template", root / "origin"
        make_template(lab, self.template)
        make_template(lab, self.origin, ("first", "fork", "alone", "tenant"))
        self.states = states(record(self.origin))

    def store_crashes(self, writer: WriterProcess, end: float) -> Iterator[Crash]:
        """At each write point each time, then at moments until ``end`` seconds, 5 at least."""
        path = self.root / "whole"
        began = time.monotonic()
        answer = writer.crash(path)
        seconds = time.monotonic() - began
        if answer["signal"] or "reached" not in answer:
            yield Crash(where="none", wrong=[f"the steps can't be done: {answer}"])
            return
        reached = collections.Counter(answer["reached"])
        for point in WRITES:
            for nth in range(1, reached[point.value] + 1):
                answer = writer.crash(self._new(), point=point.value, nth=nth)
                yield self._after(Crash(where=point.value, nth=nth), answer)
        for number in range(1, 1000):
            if number > 5 and time.monotonic() > end:
                return
            answer = writer.crash(self._new(), after_s=self.random.random() * seconds)
            yield self._after(Crash(where="some moment", nth=number), answer, must_die=False)

    def engine_crashes(self) -> Iterator[Crash]:
        """Of a whole engine, in a process of its own each."""
        for point, nth in ENGINE:
            path, crash = self._new(), Crash(where=f"engine: {point.value}", nth=nth)
            ended = subprocess.run(
                [
                    *(sys.executable, __file__, "engine"),
                    *(str(self.template), str(path), point.value, str(nth)),
                ],
                capture_output=True,
                text=True,
                timeout=10 * _HANG_S,
                check=False,
            )
            if ended.returncode != -signal.SIGKILL:
                crash.wrong.append(f"it was not killed: {ended.stderr[-300:]}")
            yield self._reopened(crash, path)

    def _new(self) -> pathlib.Path:
        path = self.root / "crashed"
        shutil.rmtree(path, ignore_errors=True)
        return path

    def _after(self, crash: Crash, answer: dict[str, Any], *, must_die: bool = True) -> Crash:
        path, done = self.root / "crashed", answer["done"]
        if answer["hung"] or (must_die and answer["signal"] != signal.SIGKILL):
            crash.wrong.append(f"it was not killed there: {answer}")
        if (path / "store.json").exists():
            with Store.open_as_is(path) as reader:
                crash.wrong += [f"a reader sees {problem}" for problem in reader.problems]
                crash.wrong += self._half_visible(state_of(reader), done)
        return self._reopened(crash, path)

    def _half_visible(self, found: State, done: int) -> list[str]:
        """Whether it is other than what was there before a step or is there after it."""
        before, after = self.states[done], self.states[min(done + 1, len(self.states) - 1)]
        if found in (before, after):
            return []
        # A removal is of several manifests, leaves first, each of them at once.
        between = all(b >= f >= a for b, f, a in zip(before, found, after, strict=True))
        return [] if between else [f"step {done} is half visible: {[len(x) for x in found]}"]

    def _reopened(self, crash: Crash, path: pathlib.Path) -> Crash:
        """A new writer with an engine on the folder: tidied, right bits, and it stores on."""
        lab = self.lab
        try:
            lab.attach(lab.options(path))
            store = lab.mover.store
            assert store is not None, lab.mover.unusable
            crash.blocks = store.blocks
            crash.wrong += [f"after opening: {x}" for x in (*store.problems, *store.verify())]
            crash.wrong += lab.ask("first", "fork", "alone", "tenant")
            counters = lab.mover.counters
            crash.wrong += [] if lab.flush() else ["not all was stored"]
            crash.loaded = counters.loaded[Tier.DISK]
            crash.stored = counters.stored[Tier.DISK]
            if crash.blocks and not crash.loaded:
                crash.wrong.append("what was found was not loaded")
            failed = sum(counters.failed_stores.values()) + counters.failed_loads
            crash.wrong += [f"{failed} failed: {counters.last_error}"] if failed else []
            crash.wrong += [f"after storing: {x}" for x in store.verify()]
            missing = self.states[-1][0] - state_of(store)[0]
            crash.wrong += [f"{len(missing)} blocks were not stored again"] if missing else []
            crash.wrong += lab.held()
            lab.detach()
        except Exception as error:  # this crash is over, and this is what it found
            crash.wrong.append(f"{type(error).__name__}: {error}")
            try:
                lab.attach(None)
            except Exception as later:  # told with what was found first
                crash.wrong.append(f"the end of it: {type(later).__name__}: {later}")
        return crash


def crash(
    lab: Any,
    root: pathlib.Path,
    *,
    budget_s: float,
    seed: int,
    progress: Callable[[Crash], None] = lambda crash: None,
) -> list[Crash]:
    """All crashes that the budget allows: of a writer at every point, of some engines.

    Args:
      lab: a ``fault_lab.Lab``.
      root: an empty folder.
      budget_s: seconds; every write point is visited in any case.
      seed: of the moments without a point.
      progress: told of each crash.
    """
    end = time.monotonic() + budget_s
    verifier, crashes = Verifier(lab, root, seed), []
    writer = WriterProcess(verifier.origin)
    try:
        for each in verifier.store_crashes(writer, end - budget_s / 3):
            progress(each)
            crashes.append(each)
    finally:
        writer.close()
    for number, each in enumerate(verifier.engine_crashes()):
        progress(each)
        crashes.append(each)
        if number and time.monotonic() > end:
            break
    return crashes


def verify(root: pathlib.Path, *, budget_s: float, seed: int) -> tuple[bool, dict[str, Any]]:
    """The ``crash`` check: whether all is right, and the result."""
    import fault_reports
    from fault_lab import Lab

    with fault_reports.progress("crash") as tell:
        crashes = crash(
            Lab(),
            root,
            budget_s=budget_s,
            seed=seed,
            progress=lambda x: tell(f"{x.where} {x.nth}"),
        )
    rows = fault_reports.grouped(
        "a process that writes a store killed at each write point, then reopened",
        ["killed at", "crashes", "blocks found", "loaded", "stored", "wrong"],
        [(x.where, (1, x.blocks, x.loaded, x.stored, bool(x.wrong))) for x in crashes],
    )
    fault_reports.print_wrong([(f"{x.where} {x.nth}", x) for x in crashes])
    ok = not any(x.wrong for x in crashes)
    wrong = [f"{x.where} {x.nth}: {line}" for x in crashes for line in x.wrong]
    return ok, {"crashes": len(crashes), "rows": rows, "wrong": wrong}


def main() -> None:
    """The writing processes' modes."""
    mode, *arguments = sys.argv[1:]
    if mode == "serve":
        serve(pathlib.Path(arguments[0]))
    else:
        template, path, point, nth = arguments
        engine_at_work(pathlib.Path(template), pathlib.Path(path), Point(point), int(nth))


if __name__ == "__main__":
    main()
