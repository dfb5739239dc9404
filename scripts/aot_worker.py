"""Compiles cases for one target in a process of its own; ``compile_for.py`` starts it.

    aot_worker.py REQUEST.json RESULT.json

The request names the target, the folder of the dumps if there is one, and the cases. A result is
written after each case, so that what was measured survives a crash of the compiler.
"""

import dataclasses
import json
import pathlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import aot_gpu
import aot_hlo
import aot_roofline
import aot_tpu
import jax
import kernel_cases
import llo_schedule
import numpy as np
from aot_steps import AbstractStep, StepCase, abstract_step, only_read
from targets import GIB, Target, target_of

from hybridkv.errors import UserError
from pallas_kernels.tuning import table as tuning

_REFUSED = re.compile(
    r"required for HLO \w+ \(([\d.]+)([KMGT])\)|Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm"
)
_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
FEW_BLOCKS = 1024
_UNIT = {"K": 1 << 10, "M": 1 << 20, "G": GIB, "T": 1 << 40}


def main() -> None:
    """Runs the request."""
    request = json.loads(pathlib.Path(sys.argv[1]).read_text())
    target, topology = target_of(request["target"])
    tpu = target.platform == "tpu"
    devices = aot_tpu.devices(topology) if tpu else aot_gpu.devices(target.name)
    dump = pathlib.Path(request["dump"]) if request.get("dump") else None
    results: list[Any] = []
    for case in request["cases"]:
        results.append({"target": request["target"], **_run(case, target, devices, dump)})
        pathlib.Path(sys.argv[2]).write_text(json.dumps(results))


def _run(
    case: dict[str, Any], target: Target, devices: list[Any], dump: pathlib.Path | None
) -> dict[str, Any]:
    kind = case.pop("kind")
    try:
        if kind == "step":
            sharded = case.pop("sharded")
            return _step(StepCase(**case), target, devices if sharded else devices[:1])
        name, chosen, tried = case["name"], case["implementation"], case.get("tried")
        if not tried:
            return _kernel(name, chosen, target, devices[0], dump)
        with tuning.trying(kernel_cases.tuned_operation(name, chosen), **tried):
            return {**_kernel(name, chosen, target, devices[0], dump), "tried": tried}
    except UserError as error:
        return {"name": case.get("name", kind), "user_error": str(error)}


def _kernel(
    name: str, implementation: str, target: Target, device: Any, dump: pathlib.Path | None
) -> dict[str, Any]:
    """One kernel on one device."""
    result: dict[str, Any] = {"kind": "kernel", "name": name, "implementation": implementation}
    try:
        case = kernel_cases.build(name, implementation)
        sharding = jax.sharding.SingleDeviceSharding(device)
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), case.arguments
        )
        result |= _compile(jax.jit(case.function), arguments, target)
    except UserError:
        raise
    except (NotImplementedError, ImportError, ValueError, TypeError) as x:
        return result | {"ok": False, "error": _line(x)}
    result["traffic"] = dataclasses.asdict(case.traffic)
    if result["ok"] and dump is not None:
        if target.platform == "cuda":
            result["programs"] = aot_gpu.resources(dump)
        else:
            kernels = llo_schedule.read(dump, delay_slots=target.delay_slots)
            result["kernels"] = [aot_roofline.summary(x, target) for x in kernels]
        for path in dump.iterdir():
            path.unlink()
    return result


def _step(case: StepCase, target: Target, devices: list[Any]) -> dict[str, Any]:
    """A step of a whole model on all ``devices``, or on one where they are not a named slice."""
    result: dict[str, Any] = {"kind": "step", "name": case.name, **dataclasses.asdict(case)}
    started = time.perf_counter()
    step, compiled = _step_compiled(case, target, devices, result)
    result |= {
        "devices": len(devices),
        "parameters": step.parameters,
        "tokens": step.tokens,
        "seconds": time.perf_counter() - started,
    }
    result |= compiled
    pool = _pool_bytes(step)
    fixed = compiled["memory"]["total"] - pool if compiled["ok"] else None
    if fixed is None and compiled.get("needs"):
        # What is beside the pools is found with pools of one block.
        small = abstract_step(case_of(result, case), devices, blocks=1)
        least = _compile(_jitted(small), small.arguments, target, mesh=small.mesh)
        fixed = least["memory"]["total"] - _pool_bytes(small) if least["ok"] else None
    if fixed is not None:
        per_token = pool / step.tokens
        room = int((target.hbm_bytes - fixed) / per_token) if per_token else 0
        result |= {
            "pool_bytes_per_token": per_token,
            "fixed_bytes": fixed,
            "tokens_that_fit": max(room // step.block_tokens * step.block_tokens, 0),
        }
    return result


def case_of(result: dict[str, Any], case: StepCase) -> StepCase:
    """The case with the kernels that were taken in the end."""
    return dataclasses.replace(case, kernels=result["kernels"])


def _step_compiled(
    case: StepCase, target: Target, devices: list[Any], result: dict[str, Any]
) -> tuple[AbstractStep, dict[str, Any]]:
    """Takes the kernels that the case names, or else the target's if they support it."""
    names: list[str | None] = [case.kernels]
    if case.kernels is None:
        names = [{"tpu": "tpu", "cuda": "gpu"}[target.platform], "reference"]
    for name in names:
        step = abstract_step(dataclasses.replace(case, kernels=name), devices)
        result["kernels"] = name
        try:
            pools = jax.tree.leaves(step.pools) if target.platform == "tpu" else ()
            return step, _compile(_jitted(step), step.arguments, target, pools, mesh=step.mesh)
        except UserError:
            raise
        except (NotImplementedError, ValueError) as reason:
            if name == names[-1]:
                raise UserError(f"{name} kernels: {_line(reason)}") from reason
            result["not_by"] = f"{name}: {_line(reason)}"
    raise AssertionError("unreachable")


def _jitted(step: AbstractStep) -> Any:
    return jax.jit(step.function, donate_argnums=2, out_shardings=step.out_shardings)


def _chip(arguments: tuple[Any, ...]) -> jax.sharding.Mesh:
    """A mesh of the one device that ``arguments`` are on."""
    (device,) = jax.tree.leaves(arguments)[0].sharding.device_set
    return jax.sharding.Mesh(np.asarray([device]), ("chip",))


def _compile(
    function: Any,
    arguments: tuple[Any, ...],
    target: Target,
    pools: Sequence[Any] = (),
    mesh: jax.sharding.Mesh | None = None,
) -> dict[str, Any]:
    """Compiles; what the compiler refuses is a result, not an error.

    With ``pools`` it also tells the kernels that are called, and what is done with a whole pool.
    Kernels are split over ``mesh``, and learn from it which chip they are traced for.

    Raises:
      NotImplementedError: a kernel does not support the input.
    """
    started = time.perf_counter()
    mesh = mesh or _chip(arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = function.trace(*arguments).lower(lowering_platforms=(target.platform,))
    traced = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return {"ok": False, "error": _line(error), "needs": _needs(str(error))}
    memory = _memory(compiled, target)
    collectives: dict[str, int] = {}
    text = compiled.as_text()
    for name in _COLLECTIVE.findall(text):
        collectives[name] = collectives.get(name, 0) + 1
    inside: dict[str, Any] = {}
    if pools:
        inside["kernel_calls"] = aot_hlo.kernel_calls(text)
        inside["pool_copies"] = aot_hlo.pool_copies(text, pools)
    return {
        **inside,
        "ok": True,
        "trace_seconds": traced - started,
        "compile_seconds": time.perf_counter() - traced,
        "memory": memory,
        "collectives": collectives,
    }


def _memory(compiled: Any, target: Target) -> dict[str, Any]:
    """Bytes of one device; what is donated counts once."""
    stats = compiled.memory_analysis()
    sizes = {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }
    total = sum(sizes.values())
    return {**sizes, "total": total, "limit": target.hbm_bytes, "fits": total <= target.hbm_bytes}


def _pool_bytes(step: AbstractStep) -> int:
    """Bytes of the pools on one device in the compiler's layout, padding included.

    Found for few blocks, as all may be more than the compiler takes.
    """
    blocks = step.capacity.blocks
    few = min(blocks, FEW_BLOCKS)
    pools = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((few, *x.shape[1:]), x.dtype, sharding=x.sharding),
        step.pools,
    )
    function, arguments = only_read(pools)
    if not arguments:
        return 0
    platform = arguments[0].sharding.mesh.devices.flat[0].platform
    lowering: Callable[..., Any] = jax.jit(function, keep_unused=True).trace(*arguments).lower
    compiled = lowering(lowering_platforms=("cuda" if platform == "gpu" else platform,)).compile()
    return int(compiled.memory_analysis().argument_size_in_bytes) * blocks // few


def _needs(message: str) -> int | None:
    """Bytes that the compiler says a refused program needs."""
    found = _REFUSED.search(message)
    if found is None:
        return None
    number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    return int(float(number) * _UNIT[unit])


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else text[:397] + "..."


if __name__ == "__main__":
    main()
