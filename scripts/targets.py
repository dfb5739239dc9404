"""The accelerators that ``compile_for.py`` compiles for, and what their chips can do."""

import dataclasses

from hybridkv.errors import UserError

GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One kind of accelerator; numbers are those of one JAX device."""

    name: str
    platform: str
    """``tpu`` or ``cuda``."""
    topology: str
    """The slice that programs of one device are compiled for."""
    dimensions: int = 0
    """Of a slice's name: ``4x4`` has two. 0 where there are no slices."""
    hbm_bytes: int
    """What one program may use. The TPU compiler refuses more; the GPU compiler does not."""
    hbm_bandwidth: float
    """Bytes a second."""
    clock: float = 0.0
    """Cycles a second. A kernel's schedule is in cycles."""
    core_flops: int = 0
    """bfloat16 operations a cycle of one TensorCore's matrix units."""
    cores: int = 1
    """TensorCores of one device. A kernel with one sequential grid axis runs on one of them."""
    delay_slots: int = 0
    """Bundles after a branch that run whether or not it is taken."""
    source: str

    @property
    def core_bandwidth(self) -> float:
        """HBM bytes a second of one TensorCore, taking an equal share."""
        return self.hbm_bandwidth / self.cores

    @property
    def bytes_per_cycle(self) -> float:
        """HBM bytes of one TensorCore in one cycle."""
        return self.core_bandwidth / self.clock

    def slice(self, dimensions: str | None) -> str:
        """The topology's name for a slice such as ``4x4``; without one the smallest.

        Raises:
          UserError: not a slice of this target.
        """
        if dimensions is None:
            return self.topology
        parts = dimensions.split("x")
        if not self.dimensions or len(parts) != self.dimensions or not all(map(_size, parts)):
            form = "x".join("4" * self.dimensions) or "no slices"
            raise UserError(f"{dimensions!r} is no slice of {self.name}: it has {form}")
        return f"{self.name}:{dimensions}"


def _size(text: str) -> bool:
    return text.isdigit() and int(text) > 0


_BANDWIDTH = "HBM bandwidth and bf16 rate: Cloud TPU documentation and jax's tpu_info"
_LIMIT = "memory: the compiler's limit, from its refusal of a larger program"
_CLOCK = (
    "clock: bf16 rate / operations a cycle; the compiler's own estimate for a product of "
    "4096 x 4096 matrices is"
)
TARGETS = {
    target.name: target
    for target in (
        Target(
            name="v5e",
            platform="tpu",
            topology="v5e:2x2",
            dimensions=2,
            hbm_bytes=int(15.75 * GIB),
            hbm_bandwidth=819e9,
            clock=1.5e9,
            core_flops=4 * 2 * 128 * 128,
            delay_slots=4,
            source=f"{_BANDWIDTH}; {_LIMIT}; {_CLOCK} 97 % of 131,072 a cycle",
        ),
        Target(
            name="v5p",
            platform="tpu",
            topology="v5p:2x2x1",
            dimensions=3,
            hbm_bytes=int(95.74 * GIB),
            hbm_bandwidth=2765e9,
            clock=1.75e9,
            core_flops=4 * 2 * 128 * 128,
            cores=2,
            delay_slots=4,
            source=f"{_BANDWIDTH}; {_LIMIT}; {_CLOCK} 96 % of 2 x 131,072 a cycle",
        ),
        Target(
            name="v6e",
            platform="tpu",
            topology="v6e:2x2",
            dimensions=2,
            hbm_bytes=int(31.25 * GIB),
            hbm_bandwidth=1640e9,
            clock=1.75e9,
            core_flops=2 * 4 * 256 * 256,
            delay_slots=4,
            source=f"{_BANDWIDTH}; {_LIMIT}; {_CLOCK} 87 % of 524,288 a cycle",
        ),
        Target(
            name="tpu7x",
            platform="tpu",
            topology="tpu7x:2x2x1",
            dimensions=3,
            hbm_bytes=int(94.75 * GIB),
            hbm_bandwidth=3685e9,
            clock=2.2e9,
            core_flops=2 * 4 * 256 * 256,
            delay_slots=6,
            source=f"{_BANDWIDTH}, half a chip a device; {_LIMIT}; "
            f"{_CLOCK} 83 % of 524,288 a cycle",
        ),
        Target(
            name="h100",
            platform="cuda",
            topology="1x1x1",
            hbm_bytes=int(0.9 * 80e9),
            hbm_bandwidth=3352e9,
            source="data sheet of H100 SXM; memory: nine tenths of it, as JAX may be told to take",
        ),
        Target(
            name="b200",
            platform="cuda",
            topology="1x1x1",
            hbm_bytes=int(0.9 * 180e9),
            hbm_bandwidth=8000e9,
            source="data sheet of B200; memory: nine tenths of it, as JAX may be told to take",
        ),
    )
}


def target_of(name: str) -> tuple[Target, str]:
    """The target and topology of ``v6e`` or, with a slice, ``v6e:4x4``.

    Raises:
      UserError: unknown target or slice.
    """
    base, _, dimensions = name.partition(":")
    if base not in TARGETS:
        raise UserError(f"unknown target {base!r}: known are {', '.join(TARGETS)}")
    target = TARGETS[base]
    return target, target.slice(dimensions or None)
