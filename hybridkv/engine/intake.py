"""What a request is before anything is held for it: a checked prompt, a task for each sample."""

import dataclasses
from collections.abc import Callable

import numpy as np

from hybridkv.engine.generate import check_prompt
from hybridkv.engine.options import EngineOptions
from hybridkv.engine.requests import Output, Request, prompt_ids
from hybridkv.engine.runner import Runner
from hybridkv.engine.stops import StopMatcher
from hybridkv.engine.task import Task, Text
from hybridkv.errors import UserError


def prompt_of(
    request: Request, runner: Runner, options: EngineOptions, text: Text | None
) -> np.ndarray:
    """The request's prompt, int32 ``[tokens]``.

    Raises:
      UserError: it is not one that this model takes, or asks for what the engine was not made for.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        if text is None:
            raise UserError("the prompt is text and the engine has no tokenizer: pass text=")
        prompt = text.encode(prompt)
    if request.stop and text is None:
        raise UserError("stop strings need a tokenizer: pass text=, or use stop_tokens")
    if request.logprobs is not None and request.logprobs > options.logprobs:
        raise UserError(
            f"logprobs is {request.logprobs} and the engine was made for "
            f"{options.logprobs}: raise EngineOptions.logprobs"
        )
    return check_prompt(
        runner.model,
        prompt_ids(prompt),
        max_new_tokens=request.max_new_tokens,
        capacity_tokens=runner.capacity_tokens,
    )


def tasks_of(
    request: Request,
    prompt: np.ndarray,
    runner: Runner,
    options: EngineOptions,
    text: Text | None,
    *,
    first_id: int,
    clock: Callable[[], float],
) -> list[Task]:
    """A task for each sample, with a seed of its own; all but the first wait for its prompt.

    Args:
      request: what is asked.
      prompt: its own, from ``prompt_of``.
      runner: hashes it.
      options: of the engine.
      text: makes a decoder for each.
      first_id: of the first; the others count on.
      clock: seconds; read for each.
    """
    tasks: list[Task] = []
    for sample in range(request.samples):
        seed = (request.sampling.seed + sample) % 2**32
        publish = request.publish or options.publish
        task = Task(
            id=first_id + sample,
            request=request,
            output=Output(prompt_tokens=len(prompt), publish=publish),
            prompt=prompt,
            sampling=dataclasses.replace(request.sampling, seed=seed),
            chain=runner.chain(prompt, namespace=request.namespace),
            arrived=clock(),
            stops=StopMatcher(frozenset(request.stop_tokens), request.stop),
            text=text.stream() if text is not None else None,
            leader=tasks[0] if tasks else None,
            leader_at=len(prompt),
        )
        tasks.append(task)
    return tasks
