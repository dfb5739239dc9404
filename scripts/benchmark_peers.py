"""The sides of ``decode`` and ``reuse`` that are not ours, each in a process of its own."""

import argparse
import contextlib
import os
from typing import Any

import numpy as np
from peer_process import PeerProcess

from hybridkv.errors import UserError

PEERS = {"transformers": "transformers_peer.py", "llama.cpp": "llama_cpp_peer.py"}
DEFAULTS = "llama.cpp defaults"
"""The side of llama.cpp with its own half-precision cache and flash attention."""


class Peer(PeerProcess):
    """A peer process; see ``peers/transformers_peer.py`` and ``peers/llama_cpp_peer.py``."""

    def __init__(
        self, name: str, python: str, folder: str, threads: int, **start: int | bool
    ) -> None:
        super().__init__(
            python,
            PEERS[name],
            {"folder": folder, "threads": threads, **start},
            "install the peers extra (pip install -e '.[peers]') or name a Python that has it "
            "with --peer-python",
        )

    def prefill(self, ids: np.ndarray) -> dict[str, Any]:
        """Consumes a prompt into an empty cache."""
        return self.ask({"call": "prefill", "ids": ids.tolist()})

    def decode(self, ids: np.ndarray) -> dict[str, Any]:
        """Consumes tokens one by one."""
        return self.ask({"call": "decode", "ids": ids.tolist()})

    def prompt(self, ids: np.ndarray, *, reuse: bool) -> dict[str, Any]:
        """Time to the first token of a prompt, with the peer's own prefix reuse or without."""
        answer = self.ask({"call": "prompt", "ids": ids.tolist(), "reuse": reuse})
        return {"seconds": answer["first_token_seconds"], "reused": answer["cached"]}

    def cache_bytes(self) -> int | None:
        """Bytes the cache holds now; None where the peer does not say."""
        return self.ask({"call": "cache_bytes"})["bytes"]


class LlamaCpp(Peer):
    """llama.cpp at its own decode rate, within one request of its server."""

    def decode(self, ids: np.ndarray) -> dict[str, Any]:
        """Mean seconds of as many tokens as ``ids``; it goes on with its own likeliest ones."""
        answer = self.ask({"call": "generate", "count": len(ids) + 1})
        return {"seconds": [answer["seconds"]]}

    def cache_bytes(self) -> int | None:
        """Its server does not say."""
        return None


def open_peers(
    args: argparse.Namespace, folder: str, stack: contextlib.ExitStack
) -> dict[str, Peer]:
    """A process for each side that is not ours, ended with ``stack``.

    Raises:
      UserError: a peer cannot run, or ``--peer-defaults`` has nothing to act on.
    """
    if args.peer_defaults and "llama.cpp" not in args.peer:
        raise UserError("--peer-defaults is an option of llama.cpp: give --peer llama.cpp too")
    threads = os.cpu_count() or 1
    context = args.context + args.tokens + 512
    peers: dict[str, Peer] = {}
    for name in [*dict.fromkeys(args.peer), *([DEFAULTS] if args.peer_defaults else [])]:
        if name == "transformers":
            peers[name] = Peer(name, args.peer_python, folder, threads)
        else:
            peers[name] = LlamaCpp(
                "llama.cpp",
                args.peer_python,
                folder,
                threads,
                context=context,
                defaults=name == DEFAULTS,
            )
        stack.callback(peers[name].close)
    return peers
