"""The TPU compiler without a TPU: its environment and its devices."""

import pathlib
from collections.abc import Mapping
from typing import Any

ENVIRONMENT: Mapping[str, str] = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
"""What a process needs before it imports jax. The accelerator named here is none that programs are
compiled for: libtpu wants one, whatever it is."""
KINDS: Mapping[str, str] = {
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "tpu7x": "TPU7x",
}
"""What JAX calls the device of a target, for those who have no compiler to ask."""
PLUGIN = "libtpu"
"""The module whose presence says that the compiler is there."""


def environment(dump: pathlib.Path | None) -> dict[str, str]:
    """Variables for a process that compiles; with ``dump`` it writes every kernel's schedule."""
    if dump is None:
        return dict(ENVIRONMENT)
    flags = (
        f"--xla_jf_dump_to={dump}",
        "--xla_jf_dump_llo_text=true",
        # Of some seventy passes only the last: all of them take tens of MB and seconds a kernel.
        "--xla_jf_dump_llo_pass_label_regex=final",
    )
    return {**ENVIRONMENT, "LIBTPU_INIT_ARGS": " ".join(flags)}


def devices(topology: str) -> list[Any]:
    """Devices of a slice that does not exist, such as ``v6e:4x4``."""
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(topology, platform="tpu").devices)
