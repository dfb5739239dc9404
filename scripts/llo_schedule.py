"""Reads the final schedule that the TPU compiler writes for a Pallas kernel.

    final_bundles.txt                one line a bundle: address, label, nesting, instructions
    static-per-bundle-utilization    one line a bundle: how many slots of each unit it fills

A bundle is at best one cycle. What the schedule can't say: how long the kernel waits for DMAs and
semaphores, stalls of a full queue, and which predicated regions run how often. So a loop has three
lengths: ``most`` (every region runs), ``least`` (none does), and ``steady``: regions run that do
most of the work around them or start a read of HBM (of alternatives the longest), others, such as
the first and last iteration's work, do not.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

GRANULE_BYTES = 32
"""Bytes of a DMA's ``size_in_granules``; a copy of 128 x 512 bfloat16 has 4096 of them."""
ALTERNATIVE = 0.03
"""Regions that read as much, each with at least this share of their surroundings' vector work, are
alternatives."""
MOST = 0.6
"""A region with more than this share of its surroundings' vector work is taken to run each time.
Of two alternatives, each with half, that is neither."""

_BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) +(?:[A-Z]{2})? *: +((?:> ?)*)\{", re.MULTILINE)
_BRANCH = re.compile(r"sbr\.rel (?:\([^)]*\) )?target = \$region(\d+)")
_REGION = re.compile(r"(?:Start|Start/End empty) region (\d+)")
_DMA = re.compile(r"= dma\.(\w+)\b(.*?)(?:;;|$)", re.DOTALL)
_GRANULES = re.compile(r"/\*size_in_granules=\*/(\d+)")
_PLACES = re.compile(r"/\* (hbm|vmem|smem)-to-(hbm|vmem|smem)")
_WHOLE_PROGRAM = "TLP"
_SCALAR = "SALU"
_WAIT = re.compile(r"dma\.done\.wait (?:\([^)]*\) )?[^\s,]+, (\d+)")
_UNITS = re.compile(r"^== CAPAC\w+:\n(.*)\n(.*)\n== UTILIZATION:\n", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dma:
    """One copy that the kernel starts."""

    bundle: int
    source: str
    """``hbm``, ``vmem``, ``smem``, or ``unknown``."""
    target: str
    bytes: int | None
    """None where the size is computed at run time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """Bundles ``start ... stop - 1``, which a branch may skip."""

    start: int
    stop: int

    @property
    def bundles(self) -> int:
        """How many."""
        return self.stop - self.start

    def holds(self, bundle: int) -> bool:
        """Whether ``bundle`` is one of them."""
        return self.start <= bundle < self.stop

    def inside(self, other: "Region") -> bool:
        """Whether ``other`` holds all of this one and more."""
        return self != other and other.start <= self.start and self.stop <= other.stop


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A kernel's bundles, loops, regions and copies."""

    name: str
    bundles: int
    loops: tuple[Region, ...]
    regions: tuple[Region, ...]
    dmas: tuple[Dma, ...]
    waits: tuple[tuple[int, int], ...] = ()
    """Bundle of each wait for copies, and the bytes it waits for."""
    units: tuple[str, ...] = ()
    capacity: tuple[int, ...] = ()
    """Slots of each unit in one bundle."""
    used: tuple[tuple[int, ...], ...] = ()
    """Slots in use: a row a bundle."""

    @functools.cached_property
    def _known(self) -> dict[Any, Any]:
        """What was asked before. A kernel of a tile has hundreds of loops."""
        return {}

    def _once(self, key: tuple[Any, ...], function: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = function()
        return self._known[key]

    def body(self, loop: Region) -> set[int]:
        """Bundles of ``loop`` without those of loops inside it."""

        def bundles() -> set[int]:
            inner = [other for other in self.loops if other.inside(loop)]
            return _without(loop, inner)

        return self._once(("body", loop), bundles)

    def skipped_regions(self, loop: Region, path: str) -> list[Region]:
        """Regions of one iteration that do not run on ``path``: most, steady or least."""
        return self._once(("skipped", loop, path), lambda: self._skipped(loop, path))

    def _skipped(self, loop: Region, path: str) -> list[Region]:
        if path == "most":
            return []
        skipped = []
        around: list[tuple[Region, bool]] = [(loop, True)]
        body = self.body(loop)
        inside = [x for x in self.regions if x.inside(loop)]
        for region in sorted(inside, key=lambda x: (x.start, -x.stop)):
            parent, parent_runs = next(x for x in reversed(around) if region.inside(x[0]))
            runs = path == "steady" and parent_runs and self._steady(region, parent, body, inside)
            around.append((region, runs))
            if not runs:
                skipped.append(region)
        return skipped

    def run(self, loop: Region, path: str) -> set[int]:
        """Bundles of one iteration on ``path``, without loops inside it."""

        def bundles() -> set[int]:
            return self.body(loop) & _without(loop, self.skipped_regions(loop, path))

        return self._once(("run", loop, path), bundles)

    def _steady(
        self, region: Region, parent: Region, body: set[int], all_: Sequence[Region]
    ) -> bool:
        reads = self._reads(region, body)
        if not reads:
            return self._work(region) > MOST * self._work(parent)
        # Where several do much work and read as much, one of them runs: that which does most.
        least = ALTERNATIVE * self._work(parent)
        if not self.used or self._work(region) < least:
            return True
        others = [x for x in all_ if x.inside(parent) and not _overlap(x, region)]
        rivals = [x for x in others if self._reads(x, body) == reads and self._work(x) >= least]
        return all(self._rank(region) > self._rank(x) for x in rivals)

    def _rank(self, region: Region) -> tuple[int, int]:
        return self._work(region), -region.start

    def _reads(self, region: Region, body: set[int]) -> list[int]:
        """Sizes of the copies from HBM that a region starts; 0 where one is not fixed."""
        return sorted(
            dma.bytes or 0
            for dma in self.dmas
            if region.holds(dma.bundle)
            and dma.bundle in body
            and (dma.source, dma.target) == ("hbm", "vmem")
        )

    def _work(self, region: Region) -> int:
        """Slots of vector units in use, or bundles where that is not known."""
        if not self.used:
            return region.bundles
        vector = [column for column, unit in enumerate(self.units) if unit != _SCALAR]

        def work() -> int:
            bundles = range(region.start, region.stop)
            return sum(self.used[i][column] for i in bundles for column in vector)

        return self._once(("work", region), work)

    def cycles(self, loop: Region, path: str) -> int:
        """Bundles of one iteration, without loops inside it."""
        return len(self.run(loop, path))

    def busy(self, loop: Region, path: str) -> dict[str, float]:
        """Cycles that each unit alone would need for what one iteration gives it."""

        def cycles() -> dict[str, float]:
            run = self.run(loop, path)
            return {
                unit: sum(self.used[i][column] for i in run) / self.capacity[column]
                for column, unit in enumerate(self.units)
            }

        return self._once(("busy", loop, path), cycles)

    def read_bytes(self, loop: Region, path: str) -> int | None:
        """Bytes of the copies from HBM that one iteration starts; None if one has no fixed size.

        A copy that is predicated without a branch counts.
        """
        run = self.run(loop, path)
        sizes = [d.bytes for d in self.dmas if d.bundle in run and d.source == "hbm"]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def waited_bytes(self, loop: Region, path: str) -> int:
        """Bytes of copies that one iteration waits for."""
        run = self.run(loop, path)
        return sum(size for bundle, size in self.waits if bundle in run)


def _overlap(a: Region, b: Region) -> bool:
    return a.start < b.stop and b.start < a.stop


def _without(loop: Region, parts: Iterable[Region]) -> set[int]:
    """The bundles of ``loop`` that no part holds."""
    bundles = set(range(loop.start, loop.stop))
    for part in parts:
        bundles.difference_update(range(part.start, part.stop))
    return bundles


def parse(text: str, utilization: str = "", *, name: str = "", delay_slots: int) -> Schedule:
    """A schedule from the two dumps.

    Args:
      text: of ``*final_bundles.txt``.
      utilization: of ``*final_hlo-static-per-bundle-utilization.txt``, or nothing.
      name: of the kernel.
      delay_slots: bundles after a branch that run whether or not it is taken.

    Raises:
      ValueError: this is not such a dump, or the two are not of one kernel.
    """
    bundles = list(_bundles(text))
    if not bundles:
        raise ValueError("no bundles: this is not a final_bundles dump")
    loops, regions = _branches(bundles, delay_slots)
    units, capacity, used = _utilization(utilization)
    if used and len(used) != len(bundles):
        raise ValueError(f"{len(bundles)} bundles, but utilization of {len(used)}")
    return Schedule(
        name=name,
        bundles=len(bundles),
        loops=loops,
        regions=regions,
        dmas=tuple(_dmas(bundles)),
        waits=tuple(
            (i, int(size) * GRANULE_BYTES)
            for i, bundle in enumerate(bundles)
            for size in _WAIT.findall(_without_checks(bundle))
        ),
        units=units,
        capacity=capacity,
        used=used,
    )


def _bundles(text: str) -> Iterator[str]:
    """The text of each bundle, comments included."""
    heads = list(_BUNDLE.finditer(text))
    for number, head in enumerate(heads):
        if int(head[1], 16) != number:
            raise ValueError(f"bundle {number} has address {head[1]}: the dump is not whole")
        stop = heads[number + 1].start() if number + 1 < len(heads) else len(text)
        yield text[head.end() : stop]


def _branches(
    bundles: Sequence[str], delay_slots: int
) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    """Loops, which are branches back, and the regions that branches forward skip."""
    starts = _region_starts(bundles)
    loops, skips = [], []
    for i, bundle in enumerate(bundles):
        for branch in _BRANCH.finditer(bundle):
            # The region after the last one is not marked.
            place = starts.get(int(branch[1]), len(bundles) - 1)
            after = i + delay_slots + 1
            if place <= i:
                loops.append(Region(start=place, stop=min(after, len(bundles))))
            elif place > after:
                skips.append((i, Region(start=after, stop=place)))
    regions = []
    for i, region in skips:
        # A loop may begin in the delay slots of the branch that skips it.
        around = [
            x for x in loops if i < x.start and x.holds(region.start) and x.stop <= region.stop
        ]
        start = min([region.start, *(x.start for x in around)])
        regions.append(Region(start=start, stop=region.stop))
    return tuple(loops), tuple(regions)


def _region_starts(bundles: Sequence[str]) -> dict[int, int]:
    return {
        int(number): i for i, bundle in enumerate(bundles) for number in _REGION.findall(bundle)
    }


def _dmas(bundles: Iterable[str]) -> Iterator[Dma]:
    for i, bundle in enumerate(bundles):
        for copy in _DMA.finditer(_without_checks(bundle)):
            kind, rest = copy[1], copy[2]
            if kind.startswith("done"):
                continue
            source, _, target = kind.partition("_to_")
            if not target:  # dma.general says where from and to in a comment
                places = _PLACES.search(rest)
                source, target = (places[1], places[2]) if places else ("unknown", "unknown")
            size = _GRANULES.search(rest)
            yield Dma(
                bundle=i,
                source=source,
                target=target,
                bytes=int(size[1]) * GRANULE_BYTES if size else None,
            )


def _without_checks(bundle: str) -> str:
    """The bundle without bounds checks, which quote the copy that they guard."""
    return "" if "shalt.err" in bundle else bundle


def _utilization(
    text: str,
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]:
    if not text:
        return (), (), ()
    head = _UNITS.search(text)
    if head is None:
        raise ValueError("no unit names: this is not a per-bundle utilization dump")
    units = tuple(name.strip() for name in head[1].split(","))
    capacity = tuple(int(number) for number in head[2].split())
    used = tuple(tuple(map(int, line.split())) for line in text[head.end() :].splitlines() if line)
    if len(units) != len(capacity) or any(len(row) != len(units) for row in used):
        raise ValueError("the utilization dump's columns do not agree")
    return units, capacity, used


def read(folder: pathlib.Path, *, delay_slots: int) -> list[Schedule]:
    """The Pallas kernels whose dumps lie in ``folder``.

    A kernel that was compiled more than once gives its last schedule.
    """
    kernels: dict[str, Schedule] = {}
    for path in sorted(folder.glob("*-schedule-analysis_final_bundles.txt")):
        stem = path.name.rpartition("-schedule-analysis")[0].rpartition("-")[0]
        name = stem.partition("-")[2]
        if name == _WHOLE_PROGRAM or "tpu_custom_call" not in path.read_text(errors="replace"):
            continue
        bundles = _only(folder, f"{stem}-*[0-9]-final_bundles.txt")
        units = _only(folder, f"{stem}-*-final_hlo-static-per-bundle-utilization.txt")
        if bundles is not None:
            text = bundles.read_text(errors="replace")
            used = units.read_text(errors="replace") if units else ""
            kernels[name] = parse(text, used, name=name, delay_slots=delay_slots)
    return list(kernels.values())


def _only(folder: pathlib.Path, pattern: str) -> pathlib.Path | None:
    return next(iter(sorted(folder.glob(pattern))), None)
