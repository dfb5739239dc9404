"""Several engines side by side, one chosen for each request.

The same model may run over a cache of five kinds and over uniform raw rows
(``hybridkv.state.generic``), with reuse and without. Each scheme has an engine with pools of its
own; nothing is shared between them, since what one stores the other cannot read.
"""

from collections.abc import Callable, Iterable, Mapping

from hybridkv.engine.engine import Engine
from hybridkv.engine.handle import Handle
from hybridkv.engine.requests import Output, Request
from hybridkv.errors import UserError


class Schemes:
    """Sends each request to the engine of its scheme, and runs them all in turn."""

    def __init__(self, engines: Mapping[str, Engine], choose: Callable[[Request], str]) -> None:
        """Takes engines that are made already.

        Args:
          engines: by name of scheme.
          choose: the name for a request; must depend on the request alone.
        """
        self.engines = dict(engines)
        self._choose = choose

    def submit(self, request: Request) -> Handle:
        """Takes a request; see ``Engine.submit``.

        Raises:
          UserError: as the engine does, or the chosen scheme does not exist.
        """
        name = self._choose(request)
        if name not in self.engines:
            known = ", ".join(self.engines)
            raise UserError(f"there is no scheme {name!r}: choose one of {known}")
        return self.engines[name].submit(request, driver=self.step)

    def step(self) -> bool:
        """One turn of every engine; False where none had anything to compute."""
        return any([engine.step() for engine in self.engines.values()])

    def run(self, requests: Iterable[Request]) -> list[Output]:
        """Runs requests together to their ends; the outputs of all, in order.

        Raises:
          UserError: one of them is refused; none was started.
        """
        handles: list[Handle] = []
        try:
            for request in requests:
                handles.append(self.submit(request))
        except UserError:
            for handle in handles:
                handle.cancel()
            raise
        while not all(handle.done for handle in handles):
            self.step()
        return [output for handle in handles for output in handle.outputs]


def hybrid_above(tokens: int) -> Callable[[Request], str]:
    """Chooses ``hybrid`` for prompts of more than ``tokens`` token ids, else ``generic``."""

    def choose(request: Request) -> str:
        if isinstance(request.prompt, str):
            raise UserError("a choice by length needs token ids: encode the prompt first")
        return "hybrid" if len(request.prompt) > tokens else "generic"

    return choose
