"""Sequences that go from a prefill process to a decode process: the ``handoff`` check.

    this process   prompt, tokens --JSON line--> prefill process: tiles, decode steps, export
                   import, decode steps   <--length, bytes--
                   the same tokens from first to last in this process: the digests must be equal

Run as a command it is the prefill process of one model; ``verify.py handoff`` starts it.
"""

import contextlib
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
from verify_restore import LONGEST, digest, make_runner

from hybridkv.engine.handoff import export_sequence, import_sequence
from hybridkv.engine.runner import Runner
from hybridkv.engine.sequence import Sequence
from hybridkv.errors import UserError
from hybridkv.prefixes.policy import NEVER
from hybridkv.tiers.handoff_record import HandOff

DECODED = 12
"""Tokens that the decode process consumes."""
PREFIX_BYTES = 8
REMEDY = "run it by hand to see why: python scripts/verify_handoff.py MODEL"


class PrefillProcess:
    """Another process with the same model, which computes prompts and hands them off."""

    def __init__(self, model: str) -> None:
        command = [sys.executable, str(pathlib.Path(__file__).resolve()), model]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, ids: np.ndarray, decoded: np.ndarray, namespace: str) -> bytes:
        """A prompt and tokens to decode after it; the bytes that come through the pipe.

        Raises:
          UserError: the process ended.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        question = {"ids": ids.tolist(), "decoded": decoded.tolist(), "namespace": namespace}
        with contextlib.suppress(BrokenPipeError):  # then its answer is missing, below
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()
        length = int.from_bytes(stdout.read(PREFIX_BYTES), "little")
        data = stdout.read(length)
        if not length or len(data) != length:
            raise UserError(f"the prefill process ended before its sequence was whole: {REMEDY}")
        return data

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.communicate()


def serve(model: str) -> None:
    """The prefill process: answers each line of standard input with a sequence."""
    runner, out = make_runner(model), sys.stdout.buffer
    for line in sys.stdin:
        question = json.loads(line)
        ids, namespace = np.asarray(question["ids"], np.int32), question["namespace"]
        decoded = question["decoded"]
        sequence = runner.start(
            ids, max_new_tokens=len(decoded) + 1, namespace=namespace, policy=NEVER
        )
        runner.prefill(sequence)
        decode(runner, sequence, decoded)
        data = export_sequence(runner, sequence).to_bytes()
        runner.finish(sequence)
        out.write(len(data).to_bytes(PREFIX_BYTES, "little") + data)
        out.flush()


def decode(runner: Runner, sequence: Sequence, tokens: Any) -> list[str]:
    """Digests of the logits after each token."""
    return [digest(runner.decode({sequence: int(token)})[sequence]) for token in tokens]


def verify(model: str, cases: int, seed: int, *, runner: Runner | None = None) -> dict[str, Any]:
    """Hands off ``cases`` random sequences of one model; ``ok`` is whether all digests were equal.

    Args:
      model: as ``verify_restore.make_runner`` takes it.
      cases: sequences; their lengths go through every place of an open cell.
      seed: of prompts and tokens.
      runner: of this process, instead of one that is made.
    """
    process = PrefillProcess(model)
    try:
        return _verify(process, runner or make_runner(model), cases, seed)
    finally:
        process.close()


def _verify(process: PrefillProcess, runner: Runner, cases: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    vocab, mismatches, sizes, seconds = runner.model.vocab_size, 0, [], []
    for case in range(cases):
        ids = rng.integers(0, vocab, int(rng.integers(1, LONGEST - DECODED))).astype(np.int32)
        # Handed off after the prompt, or after some tokens: prefill and decode in both processes.
        there = rng.integers(0, vocab, case % 2 * int(rng.integers(1, 9)))
        here = rng.integers(0, vocab, DECODED)
        data = process.ask(ids, there, f"case {case}")
        began = time.perf_counter()
        handoff = HandOff.from_bytes(data)
        sequence = import_sequence(
            runner, handoff, max_new_tokens=DECODED, namespace=f"case {case}"
        )
        jax.block_until_ready(runner.cache)
        seconds.append(time.perf_counter() - began)
        sizes.append(len(data))
        got = decode(runner, sequence, here)
        runner.finish(sequence)
        whole = runner.start(
            ids, max_new_tokens=len(there) + DECODED, namespace=f"unbroken {case}", policy=NEVER
        )
        runner.prefill(whole)
        decode(runner, whole, there)
        mismatches += got != decode(runner, whole, here)
        runner.finish(whole)
    return {
        "ok": not mismatches and cases > 0,
        "cases": cases,
        "mismatches": mismatches,
        "tokens compared": cases * DECODED,
        "median bytes": int(np.median(sizes)),
        "median seconds to take over": float(np.median(seconds)),
    }


if __name__ == "__main__":
    serve(sys.argv[1])
