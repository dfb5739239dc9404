"""What the engine's thread runs: one engine, or the engines of a rollout.

Both are made, called and ended on that thread. What changes an engine outside its turns is done
under its ``turn_lock``, so that a page of metrics may look at it from another thread.
"""

import hashlib
from typing import Any

from hybridkv.engine.engine import Engine
from hybridkv.engine.handle import Handle
from hybridkv.engine.requests import Request
from hybridkv.observe.rollout_schemes import RolloutSchemes


class OneEngine:
    """Everything on one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        """That reuses prefixes."""
        self.fingerprint = fingerprint(engine)

    @property
    def waiting(self) -> int:
        """Outputs that somebody waits for."""
        return self.engine.waiting

    @property
    def has_tiers(self) -> bool:
        """Whether there is work while nothing is asked."""
        return self.engine.runner.mover is not None

    def step(self) -> bool:
        """One turn; False where there was nothing to compute."""
        return self.engine.step()

    def submit(self, request: Request) -> Handle:
        """See ``Engine.submit``."""
        with self.engine.turn_lock:
            return self.engine.submit(request)

    def cancel(self, handle: Handle) -> None:
        """See ``Engine.cancel``."""
        with self.engine.turn_lock:
            self.engine.cancel(handle)

    def reset(self) -> None:
        """Cancels everything and forgets every prefix."""
        with self.engine.turn_lock:
            self.engine.reset()

    def close(self, *, timeout_s: float) -> bool:
        """See ``Engine.close``."""
        with self.engine.turn_lock:
            return self.engine.close(timeout_s=timeout_s)

    def page(self) -> bytes:
        """The page of metrics, from any thread; ``prometheus.exposition`` says what it raises."""
        from hybridkv.observe import prometheus  # an extra

        return prometheus.exposition(self.engine)

    def health(self) -> dict[str, Any]:
        """What ``/health`` says beside the status, from any thread."""
        return {}


class RolledOut:
    """Engines of which the stage of a rollout chooses one for each request."""

    def __init__(self, schemes: RolloutSchemes) -> None:
        self.schemes = schemes
        self.engine = schemes.engines[schemes.reuse]
        self.fingerprint = fingerprint(*schemes.engines.values())

    @property
    def waiting(self) -> int:
        """See ``OneEngine``; shadow runs do not count."""
        return self.schemes.waiting

    @property
    def has_tiers(self) -> bool:
        """See ``OneEngine``."""
        return self.engine.runner.mover is not None

    def step(self) -> bool:
        """See ``RolloutSchemes.step``; also looks at the state file."""
        return self.schemes.step()

    def submit(self, request: Request) -> Handle:
        """See ``RolloutSchemes.submit``."""
        return self.schemes.submit(request)

    def cancel(self, handle: Handle) -> None:
        """Ends a request and its shadow runs."""
        handle.cancel()

    def reset(self) -> None:
        """See ``RolloutSchemes.reset``."""
        self.schemes.reset()

    def close(self, *, timeout_s: float) -> bool:
        """See ``RolloutSchemes.close``."""
        return self.schemes.close(timeout_s=timeout_s)

    def page(self) -> bytes:
        """Metrics by engine, and those of the rollout."""
        from hybridkv.observe import prometheus  # an extra

        return prometheus.exposition(self.schemes.engines, rollout=self.schemes.told)

    def health(self) -> dict[str, Any]:
        """Where the rollout stands. No reasons: they name people and requests."""
        state = self.schemes.told.state
        last = state.history[-1].cause if state.history else None
        told: dict[str, Any] = {
            "stage": state.stage.value,
            "percent": state.percent,
            "rolled_back": state.rolled_back,
            "rollbacks": state.rollbacks,
            "serving": self.schemes.stage.value,
        }
        if last is not None:
            told["cause"] = last.value
        return {"rollout": told}


Backend = OneEngine | RolledOut


def backend_of(made: Engine | RolloutSchemes) -> Backend:
    """Either, as the thread runs it."""
    return RolledOut(made) if isinstance(made, RolloutSchemes) else OneEngine(made)


def fingerprint(*engines: Engine) -> str:
    """Of everything that bits depend on beside the request: the identities of all engines."""
    roots = sorted({engine.runner.identity.root() for engine in engines})
    return f"fp_{hashlib.sha256(b''.join(roots)).hexdigest()[:16]}"
