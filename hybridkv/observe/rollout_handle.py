"""What a caller holds of a request that a rollback may move from one engine to another."""

import enum
from collections.abc import Iterator

from hybridkv.engine.handle import Handle
from hybridkv.engine.requests import Piece
from hybridkv.engine.task import Task


class UnderWay(enum.Enum):
    """What becomes of requests that reuse serves when a rollback comes."""

    FINISH = "finish"
    """They end as they are."""
    UNSEEN = "unseen"
    """Those without a token yet start over on the safe path; the others end as they are."""
    RESTART = "restart"
    """All start over on the safe path; see ``RolloutHandle.pieces``."""


class Diverged(RuntimeError):  # noqa: N818 - reads as what happened
    """A request was started over, and tokens that were given out are not those of the safe path.

    The whole output of the safe path is in ``RolloutHandle.output``.
    """


class RolloutHandle(Handle):
    """A request on its way, on whichever engine. Ask it for its outputs anew after each turn."""

    scheme = ""
    """Which serves it now."""
    restarted = False
    """A rollback made it start over: its outputs are new ones."""

    def move(self, tasks: tuple[Task, ...], scheme: str) -> None:
        """Goes on with other tasks; only its schemes call this."""
        self.tasks, self.scheme, self.restarted = tasks, scheme, True

    def pieces(self, sample: int = 0) -> Iterator[Piece]:
        """Pieces of one output as they come; runs the engines while there is none.

        After a restart it goes on behind the tokens that it gave before, where they are the same.

        Raises:
          Diverged: they are not.
        """
        given: list[int] = []
        task, read = self.tasks[sample], 0
        while True:
            if self.tasks[sample] is not task:
                task, read = self.tasks[sample], 0
            pieces = task.output.pieces
            if read < len(pieces):
                piece = pieces[read]
                read += 1
                if read > len(given):
                    given.append(piece.token)
                    yield piece
                elif piece.token != given[read - 1]:
                    raise Diverged(f"new token {read - 1} was given out and is another one cold")
            elif task.ended:
                if read < len(given):
                    raise Diverged(f"{len(given)} tokens were given out, and cold it has {read}")
                return
            else:
                self._driver()
