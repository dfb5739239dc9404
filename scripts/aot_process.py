"""Compilers in processes of their own, because they read the environment when jax is imported."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import aot_gpu
import aot_roofline
import aot_tpu
import llo_schedule
from targets import Target, target_of

from hybridkv.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEER_CASES = tuple(
    f"{name}/{tokens}"
    for name in ("sparse_mla", "lightning_indexer", "csa_gather")
    for tokens in (65536, 1048576)
)
PEER_TARGETS = ("v6e", "tpu7x")


def compile_cases(
    name: str, cases: Sequence[dict[str, Any]], *, schedule: bool, python: str | None = None
) -> list[dict[str, Any]]:
    """Compiles in a process of its own: the compilers read the environment when jax is imported.

    Args:
      name: of the target, with its slice if all devices of one are used.
      cases: as ``aot_worker`` takes them.
      schedule: whether TPU kernels are dumped and their schedules read.
      python: interpreter that has the compiler; by default that of ``make aot``.

    Raises:
      UserError: no compiler, or a case that asks for what does not exist.
    """
    target, _ = target_of(name)
    interpreter = _interpreter(target, python)
    with tempfile.TemporaryDirectory() as folder:
        base = pathlib.Path(folder)
        dump = base / "dump" if schedule else None
        if dump is not None:
            dump.mkdir()
        request, result = base / "request.json", base / "result.json"
        request.write_text(
            json.dumps({"target": name, "dump": dump and str(dump), "cases": list(cases)})
        )
        worker = pathlib.Path(__file__).with_name("aot_worker.py")
        environment = _environment(target, interpreter, dump)
        done = subprocess.run(
            [str(interpreter), str(worker), str(request), str(result)],
            env=environment,
            check=False,
            stdout=sys.stderr,
            stderr=subprocess.PIPE,
            text=True,
        )
        results = json.loads(result.read_text()) if result.exists() else []
    return _checked(results, cases, done, name)


def _checked(
    results: list[dict[str, Any]],
    cases: Sequence[dict[str, Any]],
    done: "subprocess.CompletedProcess[str]",
    target: str,
) -> list[dict[str, Any]]:
    """The results; a compiler that crashed is the result of the case that it crashed at."""
    for result in results:
        if "user_error" in result:
            raise UserError(result["user_error"])
    if done.returncode or len(results) < len(cases):
        last = _last_line(done.stderr)
        if done.returncode >= 0:  # its own error, not a signal
            raise UserError(f"the compiler's process for {target} failed: {last}")
        crashed = {**cases[len(results)], "target": target, "ok": False}
        results.append({**crashed, "error": f"the compiler died of signal {-done.returncode}"})
    return results


def _interpreter(target: Target, python: str | None) -> pathlib.Path:
    if python is not None:
        if not pathlib.Path(python).exists():
            raise UserError(f"--python {python}: there is no such file")
        return pathlib.Path(python)
    tpu = target.platform == "tpu"
    own = ROOT / (".venv-tpu" if tpu else ".venv-cuda") / "bin" / "python"
    if own.exists():
        return own
    plugin = aot_tpu.PLUGIN if tpu else aot_gpu.PLUGIN
    if importlib.util.find_spec(plugin) is not None:
        return pathlib.Path(sys.executable)
    stamp = f"{own.parent.parent.name}/.aot"
    raise UserError(f"no compiler for {target.name}: {plugin} is missing; run `make {stamp}`")


def _environment(
    target: Target, interpreter: pathlib.Path, dump: pathlib.Path | None
) -> dict[str, str]:
    if target.platform == "tpu":
        extra = aot_tpu.environment(dump)
    else:
        packages = sorted(interpreter.parent.parent.glob("lib/python3*/site-packages"))
        extra = aot_gpu.environment(packages[0] if packages else interpreter.parent, dump)
    return {**os.environ, **extra, "PYTHONPATH": str(ROOT)}


def compile_peers(name: str, cases: Sequence[str], python: str) -> list[dict[str, Any]]:
    """Compiles tokamax's kernels for one TPU with the interpreter that has them."""
    target, topology = target_of(name)
    worker = pathlib.Path(__file__).parent / "peers" / "tokamax_aot.py"
    results = []
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            dump, result = pathlib.Path(folder) / "dump", pathlib.Path(folder) / "result.json"
            dump.mkdir()
            done = subprocess.run(
                [python, str(worker), topology, case, str(result)],
                env={**os.environ, **aot_tpu.environment(dump)},
                check=False,
                capture_output=True,
                text=True,
            )
            if not result.exists():
                raise UserError(f"{worker.name} failed: {_last_line(done.stderr)}")
            found = json.loads(result.read_text())
            kernels = llo_schedule.read(dump, delay_slots=target.delay_slots)
        found["kernels"] = [aot_roofline.summary(x, target) for x in kernels]
        results.append(
            {"target": name, "kind": "kernel", "name": case, "implementation": "tokamax", **found}
        )
    return results


def _last_line(text: str) -> str:
    return ([line for line in text.splitlines() if line.strip()] or ["no output"])[-1]
