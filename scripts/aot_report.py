"""What ``compile_for.py`` prints of what it has compiled."""

from collections.abc import Sequence
from typing import Any

from targets import GIB

KERNEL_COLUMNS = (
    "kernel",
    "target",
    "compiles",
    "cycles a trip",
    "KiB a trip",
    "bound",
    "roofline",
)
STEP_COLUMNS = (
    "step",
    "target",
    "devices",
    "seconds",
    "arguments",
    "temporaries",
    "total GiB",
    "limit GiB",
    "tokens that fit",
)
PROGRAM_COLUMNS = ("kernel", "target", "program", "registers a thread", "spilled bytes a thread")
NOTE = (
    "Cycles are bundles of the loop that streams from HBM, one trip on its usual path (in brackets "
    "with every conditional part); KiB are those that its copies from HBM move in a trip, from the "
    "same dump. Where none reads HBM with a size known before the run (0: XLA put the inputs into "
    "VMEM; ?: the kernel computes it) the longest loop is shown. "
    "Roofline is the time of the bytes at full HBM bandwidth over the time of the "
    "bundles, at most 1. A static schedule does not see waits for copies and semaphores, the work "
    "before, after and between loops, or how often a conditional part runs."
)


def kernel_rows(result: dict[str, Any]) -> list[list[str]]:
    """One compiled case: a row for each Pallas kernel in it, or one where there is none."""
    name = f"{result['name']} ({result['implementation']})"
    if not result["ok"]:
        return [[name, result["target"], f"no: {result['error']}", "", "", "", ""]]
    row = [name, result["target"], f"yes, {result['compile_seconds']:.1f} s"]
    kernels = result.get("kernels", [])
    several = len(kernels) > 1
    return [
        [f"{name} {x['name']}" if several else name, *row[1:], *_loop_cells(x)] for x in kernels
    ] or [[*row, "", "", "", ""]]


def program_rows(result: dict[str, Any]) -> list[list[str]]:
    """The programs of a compiled GPU kernel."""
    return [
        [
            f"{result['name']} ({result['implementation']})",
            result["target"],
            x["name"],
            str(x["registers"]),
            str(x["spill_bytes"]),
        ]
        for x in result.get("programs", ())
    ]


def reasons(results: Sequence[dict[str, Any]]) -> list[str]:
    """Why steps were refused, or not compiled with the kernels of their target: one line each."""
    lines = []
    for result in results:
        if result["kind"] != "step":
            continue
        name = f"{result['name']} on {result['target']}"
        if "not_by" in result:
            lines.append(f"{name}: {result['kernels']} kernels, not those of {result['not_by']}")
        if not result["ok"]:
            lines.append(f"{name}: refused by the compiler: {result['error']}")
    return lines


def _loop_cells(kernel: dict[str, Any]) -> list[str]:
    """Cycles, KiB, bound and roofline of a kernel's streaming loop, else of its longest."""
    loop = kernel["streaming"] or kernel["longest"]
    if loop is None:
        return ["no loop", "", "", ""]
    cycles = f"{loop['steady']} ({loop['most']})"
    if not loop["read_bytes"]:
        return [cycles, "?" if loop["read_bytes"] is None else "0", loop["bound"], ""]
    return [cycles, f"{loop['read_bytes'] / 1024:.0f}", loop["bound"], f"{loop['fraction']:.2f}"]


def step_row(result: dict[str, Any]) -> list[str]:
    """One compiled step."""
    devices = str(result["devices"])
    fit = result.get("tokens_that_fit")
    room = "" if fit is None else f"{fit:,}"
    name = f"{result['name']} ({result['kernels']} kernels)"
    if not result["ok"]:
        needs = f"{result['needs'] / GIB:.2f}" if result.get("needs") else "?"
        return [name, result["target"], devices, "refused", "", "", needs, "", room]
    memory = result["memory"]
    return [
        name,
        result["target"],
        devices,
        f"{result['trace_seconds'] + result['compile_seconds']:.0f}",
        f"{memory['arguments'] / GIB:.2f}",
        f"{memory['temporaries'] / GIB:.2f}",
        f"{memory['total'] / GIB:.2f}" + ("" if memory["fits"] else " (too much)"),
        f"{memory['limit'] / GIB:.2f}",
        room,
    ]
