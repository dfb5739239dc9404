"""The tables of ``docs/benchmarks.md`` on what compilers say, from ``compile_for.py``'s results.

Targets stand side by side, so that a kernel is one line.
"""

from collections.abc import Callable, Sequence
from typing import Any

from aot_report import step_row

STEP_COLUMNS = ("step", "target", "arguments", "temporaries", "GiB of the limit", "tokens that fit")
Result = dict[str, Any]


def markdown(results: Sequence[Result]) -> str:
    """Kernels of TPUs, those of GPUs, steps: a table for each that there is."""
    kernels = [x for x in results if x["kind"] == "kernel"]
    tables = [
        _side_by_side(
            "bundles a trip, KiB a trip, bound, roofline",
            [x for x in kernels if x["implementation"] not in ("gpu", "tokamax")],
            _schedules,
        ),
        _side_by_side(
            "registers, spilled bytes of a thread",
            [x for x in kernels if x["implementation"] == "gpu"],
            _programs,
        ),
        _steps([x for x in results if x["kind"] == "step"]),
    ]
    return "\n\n".join(x for x in tables if x)


def _side_by_side(
    title: str, results: Sequence[Result], cells: Callable[[Result], dict[str, str]]
) -> str:
    """A line for each name that ``cells`` gives, a column for each target."""
    targets = list(dict.fromkeys(x["target"] for x in results))
    lines: dict[str, dict[str, str]] = {}
    for result in results:
        for name, cell in cells(result).items():
            lines.setdefault(name, {})[result["target"]] = cell
    rows = [[name, *(line.get(x, "") for x in targets)] for name, line in lines.items()]
    return _table([title, *targets], rows) if rows else ""


def _schedules(result: Result) -> dict[str, str]:
    """What the schedule of each kernel of a case says."""
    if not result["ok"]:
        return {result["name"]: "refused"}
    kernels = [x for x in result["kernels"] if x["streaming"] or x["longest"]]
    names = [f"{result['name']} {x['name']}" for x in kernels]
    if len(kernels) == 1:
        names = [result["name"]]
    return dict(zip(names, map(_schedule, kernels), strict=True))


def _schedule(kernel: dict[str, Any]) -> str:
    loop = kernel["streaming"] or kernel["longest"]
    if not loop["read_bytes"]:
        size = "?" if loop["read_bytes"] is None else "0"
        return f"{loop['steady']}, {size}, {loop['bound']}"
    size = f"{loop['read_bytes'] / 1024:.0f}"
    return f"{loop['steady']}, {size}, {loop['bound']}, {loop['fraction']:.2f}"


def _programs(result: Result) -> dict[str, str]:
    """Registers and spilled bytes of a case's programs."""
    if not result["ok"]:
        return {result["name"]: "refused"}
    sizes = sorted(((x["registers"], x["spill_bytes"]) for x in result["programs"]), reverse=True)
    return {result["name"]: "; ".join(f"{registers}, {spilled}" for registers, spilled in sizes)}


def _steps(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        name, target, _, _, arguments, temporaries, total, limit, room = step_row(result)
        rows.append([name, target, arguments, temporaries, f"{total} of {limit}", room])
    return _table(STEP_COLUMNS, rows) if rows else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in x) + " |" for x in lines)
