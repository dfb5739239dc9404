"""llama.cpp's server (through xllamacpp) as a process that takes commands, one JSON line each.

The first line is ``{"folder": ..., "threads": ...}``: the folder is written as GGUF and loaded. It
may add ``"context"``, the most tokens of a sequence, and ``"defaults": true`` for llama.cpp's own
half-precision cache and flash attention; without it everything is float32, as the weights are.

Commands: ``prefill``, ``decode``, ``generate`` and ``prompt``; see the methods of ``Peer``. Prompts
are token ids. The server listens on a socket file that is removed at once, and on no port. Seconds
are the server's own, from taking up a request to its first token, except where said.
"""

import importlib.metadata
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

import gguf_export

try:
    import xllamacpp

    WRITER = importlib.metadata.version("gguf")
except ImportError as missing:  # a missing distribution is one too
    print(json.dumps({"error": str(missing)}), flush=True)
    sys.exit(2)

CONTEXT = 17408
"""Tokens of a sequence unless the first line says otherwise."""


class PeerError(ValueError):
    """A command that cannot be answered; the message says why in one line."""


class Peer:
    """One model and one sequence."""

    def __init__(
        self, folder: str, threads: int, context: int = CONTEXT, defaults: bool = False
    ) -> None:
        with tempfile.TemporaryDirectory() as scratch:  # what is open outlives its name
            path = pathlib.Path(scratch)
            gguf_export.export(folder, path / "model.gguf")
            config = json.loads((pathlib.Path(folder) / "config.json").read_text())
            self.vocabulary: int = config["vocab_size"]
            self.server = _serve(path, threads, context, defaults)
        self.ids: list[int] = []

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        """Consumes a prompt into an empty cache. ``logits`` are log-probabilities of every id."""
        answer = self._complete(ids, reuse=False, probabilities=True)
        return {"seconds": _prompt_seconds(answer), "logits": self._logits(answer)}

    def decode(self, ids: list[int]) -> dict[str, Any]:
        """Consumes tokens one by one after what was consumed before."""
        if not ids:
            raise PeerError("decode needs at least one id")
        answers = []
        for at, token in enumerate(ids, start=1):
            answer = self._complete([*self.ids, token], reuse=True, probabilities=at == len(ids))
            if _cached(answer) != len(self.ids) - 1:
                raise PeerError(f"the server kept {_cached(answer)} of {len(self.ids) - 1} tokens")
            answers.append(answer)
        return {
            "seconds": [_prompt_seconds(answer) for answer in answers],
            "logits": self._logits(answers[-1]),
        }

    def generate(self, count: int) -> dict[str, Any]:
        """The next ``count`` greedy ids, in one request, and the mean seconds of one.

        This is llama.cpp's own decode rate: ``decode`` adds a request and a checkpoint to each
        token. The first id comes from what was consumed and is not timed; the last is not consumed.
        """
        if count < 2:
            raise PeerError(f"count is {count}: generate needs at least 2, the first is not timed")
        answer = self._complete(self.ids, reuse=True, probabilities=False, count=count)
        ids = [entry["id"] for entry in answer["choices"][0]["logprobs"]["content"]]
        self.ids += ids[:-1]
        return {"ids": ids, "seconds": answer["timings"]["predicted_ms"] / 1e3 / (count - 1)}

    def prompt(self, ids: list[int], reuse: bool, logits: bool = False) -> dict[str, Any]:
        """Time to the first token, with llama.cpp's prefix reuse or from nothing.

        ``first_token_seconds`` is by this process's clock, ``seconds`` by the server's; ``cached``
        counts the prompt tokens the server did not compute again; ``token`` is the greedy next id.
        ``logits`` asks for those of ``prefill`` too, and makes the answer take a little longer.

        What can be reused: llama.cpp cannot roll this model's cache back, but keeps checkpoints of
        it, 4 and ``4 + 512`` tokens before the end of each prompt and where a prompt was continued.
        A shared prefix is found if it was once a prompt, or if it reaches past such a point.
        """
        began = time.perf_counter()
        answer = self._complete(ids, reuse=reuse, probabilities=logits)
        first = time.perf_counter() - began
        told = {"logits": self._logits(answer)} if logits else {}
        return told | {
            "first_token_seconds": first,
            "seconds": _prompt_seconds(answer),
            "cached": _cached(answer),
            "token": answer["choices"][0]["logprobs"]["content"][0]["id"],
        }

    def _complete(
        self, ids: list[int], *, reuse: bool, probabilities: bool, count: int = 1
    ) -> dict[str, Any]:
        """``count`` greedy tokens after ``ids``."""
        strange = [i for i in ids if not 0 <= i < self.vocabulary]
        if not ids or strange:
            what = f"id {strange[0]} is outside the vocabulary" if strange else "no ids"
            raise PeerError(f"{what}: a prompt is ids from 0 to {self.vocabulary - 1}")
        answer = self.server.handle_completions(
            {
                "prompt": ids,
                "n_predict": count,
                "temperature": 0.0,
                "n_probs": self.vocabulary if probabilities else 1,
                "cache_prompt": reuse,
            }
        )
        if "choices" not in answer:
            error = answer.get("error", answer)
            raise PeerError(f"llama.cpp: {error.get('message', error)}")
        self.ids = list(ids)
        return answer

    def _logits(self, answer: dict[str, Any]) -> list[float]:
        """Log-probabilities of every id after the prompt."""
        values = [float("-inf")] * self.vocabulary
        for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            values[entry["id"]] = entry["logprob"]
        return values


def _serve(scratch: pathlib.Path, threads: int, context: int, defaults: bool) -> Any:
    """A server with one slot for the model in ``scratch``."""
    params = xllamacpp.CommonParams()
    params.model.path = str(scratch / "model.gguf")
    params.hostnames = [str(scratch / "llama.sock")]
    params.n_ctx = context
    params.n_gpu_layers = 0
    params.fit_params = False
    params.verbosity = 1  # errors only
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    if not defaults:
        params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        # Flash attention on a CPU rounds to half precision on the way.
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    try:
        return xllamacpp.Server(params)
    except RuntimeError as error:
        raise PeerError(
            "llama.cpp does not run the exported model; its reason is on standard error"
        ) from error


def _prompt_seconds(answer: dict[str, Any]) -> float:
    return float(answer["timings"]["prompt_ms"]) / 1e3


def _cached(answer: dict[str, Any]) -> int:
    return int(answer["timings"]["cache_n"])


def _answer(peer: Peer, line: str) -> dict[str, Any]:
    try:
        command = json.loads(line)
        call = command.pop("call", None)
        if call not in ("prefill", "decode", "generate", "prompt"):
            raise PeerError(f"no command {call!r}: there are prefill, decode, generate and prompt")
        return getattr(peer, call)(**command)
    except (ValueError, TypeError, AttributeError) as error:
        return {"error": str(error)}


def main() -> int:
    """Answers each line with a line; nothing else goes to standard output."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the library prints

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=out, flush=True)

    try:
        peer = Peer(**json.loads(sys.stdin.readline()))
    except (ValueError, TypeError) as error:  # of the line, the export or the server
        say({"error": str(error)})
        return 2
    say({"version": xllamacpp.__version__, "gguf": WRITER})
    for line in sys.stdin:
        say(_answer(peer, line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
