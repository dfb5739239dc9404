"""Checkpoints of a run: Orbax for the arrays, JSON for what the run is."""

import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from hybridkv.errors import UserError
from models.training.step import TrainState


class CheckpointError(UserError):
    """A folder that cannot be written, or holds no checkpoint of this run; says what to do."""


def make_folder(folder: pathlib.Path) -> None:
    """Makes ``folder`` if need be and writes to it, so that a long run need not find out later.

    Raises:
      OSError: it cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / ".writable"
    probe.touch()
    probe.unlink()


class Progress(NamedTuple):
    """How far a run has come."""

    step: int
    seconds: float
    """Training time so far, over all resumptions."""
    curve: list[dict[str, float]]
    """Records of the loss curve so far."""


class Checkpoints:
    """The last two checkpoints of a run in one folder. Owned by one thread; close when done."""

    def __init__(self, folder: str | pathlib.Path, identity: dict[str, Any], keep: int = 2) -> None:
        """``identity`` is JSON that says what the run is: the model's ``fields``, without which no
        checkpoint is restored, and the options it ran under, which a resumption may change.
        """
        self.folder = pathlib.Path(folder).absolute()
        self.identity = identity
        try:
            make_folder(self.folder)
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.folder}: {error.strerror}") from error
        self._manager = ocp.CheckpointManager(
            self.folder, options=ocp.CheckpointManagerOptions(max_to_keep=keep)
        )

    def start(self) -> None:
        """Makes sure that the folder has no checkpoints, as a new run needs.

        Raises:
          CheckpointError: it has.
        """
        if self._manager.latest_step() is not None:
            raise CheckpointError(
                f"{self.folder} already holds a run: add --resume or choose another folder"
            )

    def save(self, state: TrainState, progress: Progress) -> None:
        """Writes in the background; ``state`` may be donated as soon as this returns."""
        about = {"identity": self.identity, **progress._asdict()}
        self._manager.save(
            progress.step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about)
            ),
        )

    def restore(self, like: TrainState) -> tuple[TrainState, Progress]:
        """The latest checkpoint, in the structure of ``like``.

        Raises:
          CheckpointError: there is none, or it is of another model.
        """
        latest = self._manager.latest_step()
        if latest is None:
            raise CheckpointError(f"no checkpoint in {self.folder}: start without --resume")
        try:
            about = self._manager.restore(
                latest, args=ocp.args.Composite(about=ocp.args.JsonRestore())
            )["about"]
            if about["identity"]["fields"] != self.identity["fields"]:
                raise CheckpointError(f"{self.folder} holds another model: choose another folder")
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
            state = self._manager.restore(
                latest, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
            )["state"]
        except (KeyError, ValueError, TypeError, OSError) as error:
            reason = str(error).split("\n")[0]
            raise CheckpointError(f"{self.folder} is not a run of this model: {reason}") from error
        # Through the host: arrays that Orbax has tied to a device would compile the step anew.
        state = jax.tree.map(jnp.asarray, jax.device_get(state))
        return state, Progress(about["step"], about["seconds"], about["curve"])

    def close(self) -> None:
        """Waits for writes under way."""
        self._manager.wait_until_finished()
        self._manager.close()
