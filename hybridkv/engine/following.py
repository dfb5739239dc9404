"""Waiting for another prompt that is being computed, where that spares more than it costs."""

from collections.abc import Iterable

from hybridkv.arithmetic import round_down
from hybridkv.engine.runner import Runner
from hybridkv.engine.scheduler import Stage
from hybridkv.engine.sequence import Sequence
from hybridkv.engine.task import Task
from hybridkv.prefixes.hashing import equal_tokens
from hybridkv.prefixes.needs import replay_start, snapshot_kinds
from hybridkv.prefixes.plan import Plan


def follow(task: Task, tasks: Iterable[Task], runner: Runner) -> bool:
    """Puts a task behind one that will soon publish a longer prefix of it than there is now.

    Where the two part is known before it is reached, so a snapshot is written there. The one that
    is followed has a slot, so the wait is bounded by its prompt.

    Returns:
      Whether the task follows now.
    """
    if not runner.sizes.reuse:
        return False
    best, at = _longest(task, tasks, runner.options.tile)
    if best is None or best.sequence is None or best.sequence.computed >= at:
        return False
    plan = runner.plan(task.chain, namespace=task.request.namespace)
    start = plan.start if isinstance(plan, Plan) else 0
    tile, resume = runner.options.tile, at
    if not _keeps_fork(runner, best.sequence, at):
        resume = replay_start(runner.model.geometry, at, tile)
    if resume < start + tile:
        return False
    task.leader, task.leader_at = best, at
    _expect_fork(runner, best.sequence, at)
    return True


def _longest(task: Task, tasks: Iterable[Task], tile: int) -> tuple[Task | None, int]:
    """The prompt being computed that shares most with a task, and the tile boundary up to which."""
    best, at = None, 0
    for other in tasks:
        if other.stage is not Stage.PREFILLING or other.sequence is None:
            continue
        if other.request.namespace != task.request.namespace:
            continue
        common = equal_tokens(task.chain.tokens, other.chain.tokens)
        common = round_down(min(common, len(task.prompt) - 1), tile)
        if common > at:
            best, at = other, common
    return best, at


def _expect_fork(runner: Runner, sequence: Sequence, position: int) -> None:
    """Another prompt leaves a sequence at a tile boundary that is still to come.

    Where the runner keeps fork points, it gets a snapshot when it is reached.
    """
    sequence.forks = tuple(sorted({*sequence.forks, position}))
    if runner.writes_snapshots and _keeps_fork(runner, sequence, position):
        sequence.snapshots_at = tuple(sorted({*sequence.snapshots_at, position}))


def _keeps_fork(runner: Runner, sequence: Sequence, position: int) -> bool:
    """Whether a fork at a tile boundary still to come can be resumed from without a replay."""
    if not snapshot_kinds(runner.model.geometry):
        return True
    kept = runner.writes_snapshots and runner.sizes.policy.forks
    return kept and position >= sequence.exact_from
