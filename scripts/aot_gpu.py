"""The GPU compiler without a GPU: its environment and its devices."""

import os
import pathlib
import re
import subprocess
from typing import Any

from hybridkv.errors import UserError

PLUGIN = "jax_cuda12_plugin"
"""The module whose presence says that the compiler is there."""

_DEVICE = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{description}"
"""
_H100: dict[str, Any] = {
    "cores": 132,
    "bandwidth": 3352320000000,
    "cache": 52428800,
    "clock": 1.98,
    "memory": 84978434048,
    "major": 9,
    "description": "NVIDIA H100 80GB HBM3",
}
_B200: dict[str, Any] = {
    "cores": 148,
    "bandwidth": 8000000000000,
    "cache": 132644864,
    "clock": 1.965,
    "memory": 191514476544,
    "major": 10,
    "description": "NVIDIA B200",
}
_DEVICES = {"h100": _H100, "b200": _B200}
_TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)
_ENTRY = re.compile(r"\.entry (\w+)")
_NAME = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_OF_XLA = re.compile(r"fusion|^wrapped_|^memset|^AddressComputation")
"""Names of kernels that are not ours."""


def environment(packages: pathlib.Path, dump: pathlib.Path | None = None) -> dict[str, str]:
    """Variables for a process that compiles, whose packages lie in ``packages``.

    With ``dump`` it writes there what it compiles, for ``resources``.

    Raises:
      UserError: no ``ptxas`` there nor on the path.
    """
    path = os.environ.get("PATH", "")
    found = sorted(packages.glob("nvidia/*/bin/ptxas"))
    if found:
        path = f"{found[-1].parent}{os.pathsep}{path}"
    elif not any((pathlib.Path(x) / "ptxas").exists() for x in path.split(os.pathsep)):
        raise UserError(f"no ptxas in {packages} nor on the PATH: run `make .venv-cuda/.aot`")
    found_flags = os.environ.get("XLA_FLAGS", "")
    flags = {} if dump is None else {"XLA_FLAGS": f"{found_flags} --xla_dump_to={dump}".strip()}
    return {"JAX_PLATFORMS": "cpu", "PATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", **flags}


def resources(dump: pathlib.Path) -> list[dict[str, Any]]:
    """Registers of a thread and spilled bytes of each Pallas kernel in ``dump``, by ``ptxas``."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(dump.glob("*.ptx")):
        text = file.read_text()
        target = _TARGET.search(text)
        if target is None or all(map(_OF_XLA.search, _ENTRY.findall(text))):
            continue
        command = ["ptxas", "-arch", target[1], "-v", "-o", os.devnull, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        _, *parts = _NAME.split(done.stderr)
        for name, told in zip(parts[::2], parts[1::2], strict=True):
            spills, registers = _SPILLS.search(told), _REGISTERS.search(told)
            if spills and registers and not _OF_XLA.search(name):
                found[name] = {
                    "name": name,
                    "registers": int(registers[1]),
                    "spill_bytes": int(spills[1]) + int(spills[2]),
                }
    return list(found.values())


def device_kind(name: str) -> str:
    """What JAX calls the devices of a target."""
    return str(_DEVICES[name]["description"])


def devices(name: str) -> list[Any]:
    """One device of a GPU that does not exist."""
    from jax.experimental import topologies

    return list(
        topologies.get_topology_desc(
            "any",
            platform="cuda",
            topology="1x1x1",
            target_config=_DEVICE.format(**_DEVICES[name]),
        ).devices
    )
