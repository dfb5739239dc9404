"""What a caller holds of a request that was submitted."""

from collections.abc import Callable, Iterator

from hybridkv.engine.requests import Output, Piece
from hybridkv.engine.task import Task


class Handle:
    """A request on its way: its outputs grow as the engine runs.

    Iterating runs the engine until this request has ended, and gives the first output's tokens.
    """

    def __init__(
        self,
        tasks: tuple[Task, ...],
        *,
        driver: Callable[[], bool],
        cancel: Callable[["Handle"], bool],
    ) -> None:
        self.tasks = tasks
        self._driver, self._cancel = driver, cancel

    @property
    def outputs(self) -> tuple[Output, ...]:
        """One a sample."""
        return tuple(task.output for task in self.tasks)

    @property
    def output(self) -> Output:
        """The first."""
        return self.tasks[0].output

    @property
    def done(self) -> bool:
        """Whether all outputs are complete."""
        return all(task.ended for task in self.tasks)

    def pieces(self, sample: int = 0) -> Iterator[Piece]:
        """Pieces of one output as they come; runs the engine while there is none."""
        output, given = self.tasks[sample].output, 0
        while True:
            yield from output.pieces[given:]
            if given == len(output.pieces) and output.finish is not None:
                return
            given = len(output.pieces)
            if output.finish is None:
                self._driver()

    def __iter__(self) -> Iterator[int]:
        return (piece.token for piece in self.pieces())

    def result(self) -> Output:
        """Runs the engine until the request has ended; its first output."""
        while not self.done:
            self._driver()
        return self.output

    def cancel(self) -> bool:
        """Ends it with what it has; False where it had ended before."""
        return self._cancel(self)
