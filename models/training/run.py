"""A whole run: batches through steps, under a schedule, with checkpoints.

One thread owns the state; it is donated to each step and only its successor is kept.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from models.deepseek_v4.config import parse_config
from models.deepseek_v4.model import DeepseekV4
from models.training.batches import BatchOptions, make_batch
from models.training.checkpoints import Checkpoints, Progress
from models.training.optimizer import make_optimizer
from models.training.schedule import Schedule
from models.training.step import StepMetrics, StepOptions, TrainState, split_model, train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run trains. Noted in its checkpoints; a resumption may change it, for example to begin
    the decay.
    """

    seed: int = 0
    batch: BatchOptions = dataclasses.field(default_factory=BatchOptions)
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    step: StepOptions = dataclasses.field(default_factory=StepOptions)
    muon_rate: float = 0.02
    adam_rate: float = 0.004


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Where a run ends and how often it reports; not part of what it is."""

    steps: int | None = None
    seconds: float | None = None
    """Training time, over all resumptions; the schedule follows whichever limit is given."""
    stop_after: int | None = None
    """Stop at this step with a checkpoint, as if interrupted; the schedule does not change."""
    record_steps: int = 20
    """Steps averaged into one record of the curve."""
    checkpoint_seconds: float = 300.0

    def fraction(self, step: int, seconds: float) -> float:
        """How much of the run is done, in ``[0, 1]``."""
        if self.seconds is not None:
            return min(1.0, seconds / self.seconds)
        if self.steps is None:
            raise ValueError("a run needs a limit: Limits(steps=...) or Limits(seconds=...)")
        return min(1.0, step / self.steps)


Report = Callable[[float, dict[str, float]], None]
"""Called with the fraction done and each new record of the curve."""


class Run:
    """One training run of the model that ``fields`` (of a ``config.json``) describe."""

    def __init__(self, fields: dict[str, Any], text: np.ndarray, options: RunOptions) -> None:
        """``text`` is uint8 ``[bytes]``."""
        self.text, self.options = text, options
        self.identity = {"fields": fields, "options": dataclasses.asdict(options)}
        model = DeepseekV4(parse_config(fields), nnx.Rngs(options.seed))
        self.graph, parameters, biases, self.constants = split_model(model)
        self.optimizer = make_optimizer(options.muon_rate, options.adam_rate)
        self.state = TrainState(parameters, biases, self.optimizer.init(parameters))
        self.progress = Progress(0, 0.0, [])

    @property
    def model(self) -> DeepseekV4:
        """The model with the parameters of now."""
        model: DeepseekV4 = nnx.merge(
            self.graph, self.state.biases, self.state.parameters, self.constants
        )
        return model

    def resume(self, checkpoints: Checkpoints) -> None:
        """Takes the latest checkpoint's state.

        Raises:
          CheckpointError: there is none, or it is of another model.
        """
        self.state, self.progress = checkpoints.restore(self.state)

    def train(
        self,
        limits: Limits,
        checkpoints: Checkpoints | None = None,
        report: Report = lambda fraction, record: None,
    ) -> None:
        """Trains until the limit; the last state is checkpointed."""
        step, before, curve = self.progress
        started, saved = time.monotonic(), time.monotonic()
        window: list[StepMetrics] = []
        window_start = before
        seconds = before
        while (done := limits.fraction(step, seconds)) < 1.0 and step != limits.stop_after:
            window.append(self._step(step, done))
            step += 1
            seconds = before + time.monotonic() - started
            if step % limits.record_steps == 0:
                record = self._record(step, done, window, seconds, seconds - window_start)
                curve.append(record)
                report(limits.fraction(step, seconds), record)
                window, window_start = [], seconds
            self.progress = Progress(step, seconds, curve)
            if checkpoints and time.monotonic() - saved > limits.checkpoint_seconds:
                checkpoints.save(self.state, self.progress)
                saved = time.monotonic()
        if checkpoints:
            checkpoints.save(self.state, self.progress)

    def _step(self, step: int, done: float) -> StepMetrics:
        options = self.options
        batch = make_batch(self.text, step, options.batch, options.seed)
        rate = np.float32(options.schedule.rate(step, done))
        forward = dataclasses.replace(options.step.forward, sparse=options.schedule.sparse(done))
        self.state, metrics = train_step(
            self.graph,
            self.optimizer,
            dataclasses.replace(options.step, forward=forward),
            self.state,
            self.constants,
            batch.tokens,
            batch.weights,
            batch.answers,
            rate,
        )
        fetched: StepMetrics = jax.device_get(metrics)
        return fetched

    def _record(
        self, step: int, done: float, window: list[StepMetrics], seconds: float, took: float
    ) -> dict[str, float]:
        """Means over the window; quantities that no step had are left out."""
        size = self.options.batch.size * self.options.batch.length
        record = {
            "step": step,
            "bytes": step * size,
            "seconds": round(seconds, 1),
            "bytes_per_second": round(len(window) * size / took, 1),
            "rate": round(self.options.schedule.rate(step, done), 4),
            "sparse": float(self.options.schedule.sparse(done)),
        }
        for name in StepMetrics._fields:
            values = np.asarray([getattr(m, name) for m in window], np.float64)
            if not np.isnan(values).all():
                record[name] = round(float(np.nanmean(values)), 5)
        return record
