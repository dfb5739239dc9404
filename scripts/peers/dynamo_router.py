"""Dynamo's router as a process that takes commands, one JSON line each.

The first line is ``{"block_size": ...}``, in tokens. Commands: ``register``, ``remove``, ``look``
and ``choose``; see the functions. Workers are numbers. It listens to their KV events over ZeroMQ
itself, and nothing else is told to it: loads stay those of an idle fleet.
"""

import asyncio
import importlib.metadata
import json
import os
import sys
from typing import Any

os.environ.setdefault("DYN_LOG", "error")
PACKAGE, MODEL = "ai-dynamo-runtime", "model"


class Peer:
    """Dynamo's ``SelectionService`` with one model."""

    def __init__(self, start: dict[str, Any]) -> None:
        from dynamo.llm import SelectionService

        self._size: int = start["block_size"]
        self._service = SelectionService(indexer_threads=1)

    async def register(self, worker: int, events: str, replay: str) -> dict[str, Any]:
        """Subscribes to a worker's events: where they are, and where gaps are asked for."""
        return dict(
            await self._service.upsert_worker(
                {
                    "worker_id": worker,
                    "model_name": MODEL,
                    "endpoint": f"http://127.0.0.1/{worker}",  # never called
                    "kv_events_endpoint": events,
                    "replay_endpoint": replay,
                    "block_size": self._size,
                }
            )
        )

    async def remove(self, worker: int) -> dict[str, Any]:
        """Forgets a worker and all that it had."""
        return dict(await self._service.delete_worker(worker))

    async def look(self, tokens: list[int]) -> dict[str, dict[str, int]]:
        """By worker and tier, the blocks of a prompt that it has from the first one on."""
        scores = await self._service.overlap_scores({"model_name": MODEL, "token_ids": tokens})
        return {str(each["worker_id"]): each for each in scores["workers"]}

    async def choose(self, tokens: list[int]) -> dict[str, Any]:
        """Where a request would be sent; books nothing."""
        return dict(await self._service.select({"model_name": MODEL, "token_ids": tokens}))


async def _serve() -> None:
    peer = Peer(json.loads(sys.stdin.readline()))
    answer: dict[str, Any] = {"version": importlib.metadata.version(PACKAGE)}
    while True:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        line = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            return
        command = json.loads(line)
        name = command.pop("call")
        answer = {"answer": await getattr(peer, name)(**command)}


def main() -> None:
    """Answers until the input ends; what goes wrong is the last answer."""
    try:
        asyncio.run(_serve())
    except Exception as error:  # told to whoever asked, who stops
        sys.stdout.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
