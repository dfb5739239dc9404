"""What a kernel's schedule says about its speed: cycles and bytes of its loops, and the bound."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from llo_schedule import Region, Schedule
from targets import Target

PATHS = ("steady", "most", "least")
COMPUTE = ("MXU", "XLU", "EUP")
"""Units whose work makes a loop more than the issue of copies."""
BUSY = 0.5
"""Below this share of the cycles no unit is the bound: instructions wait for each other."""


GUARD = 16
"""Bundles that a region may have beside the loop which it is there to skip."""


def summary(schedule: Schedule, target: Target) -> dict[str, Any]:
    """A kernel's loops, and which of them streams.

    The streaming loop is the innermost one that reads HBM and computes; of alternatives for other
    inputs the one that reads fastest. Its fraction of the roofline is the time its bytes take at
    full HBM bandwidth over the time of its bundles, both a lower bound, so that 1 says only that
    instructions are not the limit. Where no loop reads HBM, as when XLA has put the inputs into
    VMEM, the longest one is given instead.
    """
    loops = [_loop(schedule, loop, target) for loop in schedule.loops]
    both = list(zip(schedule.loops, loops, strict=True))
    reading = [x for x in both if x[1]["read_bytes"]]
    computing = any(x["computes"] for x in loops)
    chosen = [x for x in reading if x[1]["computes"] or not computing]
    # Around a loop of which nothing is known only the work of its ends would be counted.
    deeper = chosen + [x for x in both if x[1]["computes"] and x[1]["read_bytes"] is None]
    inner = [x[1] for x in chosen if not any(other[0].inside(x[0]) for other in deeper)]
    return {
        "name": schedule.name,
        "bundles": schedule.bundles,
        "streaming": max(inner, key=_speed, default=None),
        "longest": max(loops, key=lambda x: int(x["steady"]), default=None),
        "loops": loops,
    }


def _speed(loop: dict[str, Any]) -> float:
    return float(loop["read_bytes"] / loop["steady"])


def _loop(schedule: Schedule, loop: Region, target: Target) -> dict[str, Any]:
    cycles = {path: schedule.cycles(loop, path) for path in PATHS}
    busy = schedule.busy(loop, "steady")
    computes = _computes(busy, cycles["steady"])
    read = schedule.read_bytes(loop, "steady")
    copies = _copies(schedule, loop)
    inside = _copy_loops(schedule, loop) if computes and read == 0 else []
    turns = 1
    if inside:
        each = sum(schedule.read_bytes(inner, "steady") or 0 for inner in inside)
        waited = schedule.waited_bytes(loop, "steady")
        turns = max(round(waited / each), 1)
        read = turns * each if waited else None
    for inner in inside:
        cycles = {path: n + turns * schedule.cycles(inner, path) for path, n in cycles.items()}
        copies += _copies(schedule, inner)
    result: dict[str, Any] = {
        "start": loop.start,
        **cycles,
        "read_bytes": read,
        "copies": dict(copies),
        "copy_loops": len(inside),
        "copy_loop_trips": turns,
        "computes": computes,
        "busy": {unit: round(value, 1) for unit, value in busy.items() if value},
        "bound": _bound(busy, cycles["steady"]),
    }
    if read:
        memory = read / target.bytes_per_cycle
        result["memory_cycles"] = round(memory, 1)
        for name, path in (("fraction", "steady"), ("fraction_most", "most")):
            result[name] = round(min(memory / max(cycles[path], 1), 1.0), 3)
        if memory >= cycles["steady"]:
            result["bound"] = "memory"
    return result


def _computes(busy: Mapping[str, float], cycles: float) -> bool:
    """Whether a loop is more than copies, which take a few vector instructions for their places."""
    return any(busy.get(unit) for unit in COMPUTE) or busy.get("VALU", 0) > 0.2 * cycles


def _copy_loops(schedule: Schedule, loop: Region) -> list[Region]:
    """Loops inside ``loop`` that only start copies.

    They are taken to run as often as starts what a trip waits for; where that is not a fixed size,
    the trip's bytes are not known.
    """
    skipped = schedule.skipped_regions(loop, "steady")
    found = []
    for inner in schedule.loops:
        alone = not _computes(schedule.busy(inner, "steady"), schedule.cycles(inner, "steady"))
        # A branch around nothing but the loop, for no trips at all, does not leave it out.
        left_out = any(inner.inside(x) and x.bundles > inner.bundles + GUARD for x in skipped)
        if inner.inside(loop) and alone and not left_out and schedule.read_bytes(inner, "steady"):
            found.append(inner)
    return found


def _copies(schedule: Schedule, loop: Region) -> Counter[str]:
    """How many copies of which size from HBM one iteration starts."""
    run = schedule.run(loop, "steady")
    return Counter(str(x.bytes) for x in schedule.dmas if x.bundle in run and x.source == "hbm")


def _bound(busy: dict[str, float], cycles: int) -> str:
    unit, most = max(busy.items(), key=lambda item: item[1], default=("", 0.0))
    if most < BUSY * cycles:
        return "latency"
    return {"SALU": "scalar"}.get(unit, unit)
