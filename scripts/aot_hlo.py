"""What a compiled TPU program does with the cache's pools, read from its text.

A pool is large, and a step changes few of its rows: an instruction that makes all of one again,
in another layout or memory, costs more than the rest of the step.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.-]+)")
_TYPES = {"uint8": "u8", "uint16": "u16", "uint32": "u32", "float32": "f32"}
_IN_PLACE = (
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "call-start",  # runs a computation that is in the text too, as do those after it
    "call-done",
    "async-start",
    "async-done",
    "scatter",
    "dynamic-update-slice",
    "copy-done",  # told by its copy-start
)
"""Operations that give a pool on, or change it where it is."""
_PARTS = ("bitcast", "slice-start", "slice-done")
"""XLA brings a pool to another memory in parts, as bytes."""


class Instruction(NamedTuple):
    """One line of a program, outside of fusions."""

    name: str
    types: str
    operation: str
    rest: str

    @property
    def kernel(self) -> bool:
        """Whether it is a Pallas kernel."""
        return 'custom_call_target="tpu_custom_call"' in self.rest

    @property
    def in_place(self) -> bool:
        """Whether results of the size of an operand are the operand's memory.

        Kernels and XLA's scatters alias; where XLA could not, it shows a copy before them.
        """
        if self.operation == "fusion":
            return "kind=kCustom" in self.rest
        return self.operation in _IN_PLACE or self.kernel


def pool_copies(text: str, pools: Iterable[Any]) -> list[str]:
    """The instructions that make a whole pool anew: ``copy u8[1024,128,640]``.

    Args:
      text: an optimized module's, as ``compiled.as_text()`` gives it.
      pools: arrays or shapes of pools. What is made from one, or from parts of one, counts as one
        if it has as many numbers and is as wide.
    """
    exact = {(_TYPES[str(x.dtype)], tuple(x.shape)) for x in pools}
    wanted = {_key(*x) for x in exact}
    made: set[str] = set()  # names of what is a pool or made from one
    found = []
    for each in instructions(text):
        shapes = [(kind, _sizes(sizes)) for kind, sizes in _SHAPE.findall(each.types)]
        same = [x for x in shapes if _key(*x) in wanted]
        if each.operation in ("parameter", "get-tuple-element"):
            made |= {each.name} if exact & set(shapes) else set()
        elif made.intersection(_NAME.findall(each.rest)):
            made |= {each.name} if same or each.operation in _PARTS else set()
            if same and not each.in_place:
                kind, sizes = same[0]
                found.append(f"{each.operation} {kind}[{','.join(map(str, sizes))}]")
    return found


def kernel_calls(text: str) -> dict[str, int]:
    """How often each Pallas kernel is called, by its name."""
    names = (x.name.split(".")[0] for x in instructions(text) if x.kernel)
    return dict(sorted(Counter(names).items()))


def instructions(text: str) -> Iterator[Instruction]:
    """All instructions but those inside fusions, which make nothing but their fusion's result."""
    fused = False
    for line in text.splitlines():
        if heading := _COMPUTATION.match(line):
            fused = heading[1].startswith("fused_computation")
        elif not fused and (found := _INSTRUCTION.match(line)):
            yield Instruction(*found.groups())


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(",") if x)


def _key(kind: str, shape: tuple[int, ...]) -> tuple[str, int, int]:
    count = 1
    for size in shape:
        count *= size
    return kind, count, shape[-1] if shape else 1
