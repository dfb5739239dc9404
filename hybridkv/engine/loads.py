"""What a runner asks of its mover: plans that count on loads, loads to wait for, turns to get on.

On the runner's thread.
"""

import dataclasses
import time

from hybridkv.blocks.entries import Tier
from hybridkv.engine.sequence import Hold
from hybridkv.engine.steps import MOVED_BLOCKS
from hybridkv.prefixes.cost import CostModel
from hybridkv.prefixes.plan import PlanOptions
from hybridkv.tiers.mover import Mover
from hybridkv.tiers.tickets import RestoreState


def loading_options(options: PlanOptions, mover: Mover, *, snapshots: bool) -> PlanOptions:
    """Options of a plan that may load, with what loads were seen to cost.

    Args:
      options: of plans over the device alone.
      mover: brings what is loaded.
      snapshots: whether the device has places for them.
    """
    rates = {**options.cost.bytes_per_second, **mover.bytes_per_second}
    cost = dataclasses.replace(options.cost, bytes_per_second=rates)
    return dataclasses.replace(options, loads=True, load_snapshots=snapshots, cost=cost)


def bring(mover: Mover, hold: Hold) -> None:
    """Waits until what a hold's plan loads is on the device, or will not come."""
    ticket = mover.begin(hold)
    try:
        while ticket is not None and ticket.state() is RestoreState.PENDING:
            if not mover.turn():
                time.sleep(1e-4)
    finally:
        if ticket is not None:
            ticket.cancel()


def turn_mover(mover: Mover, cost: CostModel, *, block_bytes: int, decode_seconds: float) -> bool:
    """Lets a mover get on, slowing decode steps by no more than their share; whether it moved.

    Args:
      mover: of the tiers.
      cost: knows how long a copy takes.
      block_bytes: of one block.
      decode_seconds: what the last decode step took; 0 where nothing decodes.
    """
    seconds = cost.copy(Tier.HOST, MOVED_BLOCKS * block_bytes)
    if not decode_seconds or not seconds:
        return mover.turn()
    share = mover.options.decode_share * decode_seconds
    return mover.turn(allowance=share / seconds)
