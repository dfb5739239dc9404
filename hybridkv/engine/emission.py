"""From a chosen token to a piece of an output, and to its end."""

import dataclasses

import numpy as np

from hybridkv.engine.choosing import Chosen
from hybridkv.engine.requests import Finish, Piece
from hybridkv.engine.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """Why an output ends here."""

    finish: Finish
    reason: str = ""


def take(task: Task, chosen: Chosen, number: int, seconds: float) -> End | None:
    """Adds the token that was chosen for a task to its output.

    Args:
      task: the request.
      chosen: of the step.
      number: the task's place in it.
      seconds: since the request was submitted.

    Returns:
      Why the output ends with it, or None while it goes on.
    """
    token, logprob = int(chosen.tokens[number]), float(chosen.logprobs[number])
    if not np.isfinite(logprob):
        return End(finish=Finish.FAILED, reason="the model's logits are not finite")
    try:
        text = task.text.feed(token) if task.text is not None else ""
    except Exception as error:  # a tokenizer is the caller's: its fault ends this request only
        reason = f"the tokenizer failed on token {token}: {error!r}"
        return End(finish=Finish.FAILED, reason=reason)
    emit = task.stops.feed_token(token, text)
    wanted, output = task.request.logprobs, task.output
    task.last = token
    output.pieces.append(
        Piece(
            token=token,
            text=emit.text,
            logprob=None if wanted is None else logprob,
            top=() if not wanted else chosen.top(number, wanted),
        )
    )
    if len(output.pieces) == 1:
        output.first_token_s = seconds
    output.last_token_s = seconds
    if emit.stopped:
        return End(finish=Finish.STOP)
    full = len(output.pieces) == task.request.max_new_tokens
    return End(finish=Finish.LENGTH) if full else None


def last_text(task: Task) -> str:
    """What was held back of an output that ends without a stop."""
    held = ""
    try:
        held = task.text.finish() if task.text is not None else ""
    except Exception as error:  # as in take: its output is complete all the same
        task.output.reason = f"the tokenizer failed at the end: {error!r}"
    return task.stops.flush() + held
