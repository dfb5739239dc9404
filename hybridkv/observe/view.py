"""One engine's numbers as a small table of text, for a terminal or a line of a log."""

import dataclasses

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hybridkv.blocks.entries import FORM_BITS, Form, Tier, kinds_of
from hybridkv.engine.scheduler import Stage
from hybridkv.kinds import Kind
from hybridkv.observe.metric import tier_name
from hybridkv.observe.numbers import Numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Between two looks."""

    tokens_per_second: float = 0.0
    """New tokens."""
    prompt_tokens_per_second: float = 0.0
    """Computed prompt tokens."""

    @classmethod
    def between(cls, before: Numbers | None, now: Numbers) -> "Rates":
        """Zeros where there is nothing to compare with."""
        seconds = now.taken - before.taken if before is not None else 0.0
        if before is None or seconds <= 0:
            return cls()
        new = now.counters.new_tokens - before.counters.new_tokens
        computed = now.counters.computed_tokens - before.counters.computed_tokens
        return cls(tokens_per_second=new / seconds, prompt_tokens_per_second=computed / seconds)


_FORM_OF = {kind: form for form in Form for kind in kinds_of(FORM_BITS[form])}


def occupancy(numbers: Numbers, kind: Kind, tier: Tier) -> str:
    """Used of all places, and bytes; empty where the tier has none for the kind."""
    pool = numbers.pools.get((_FORM_OF[kind], tier))
    if pool is None:
        return ""
    size = numbers.stored_bytes(kind, tier)
    return f"{pool.occupancy:4.0%} {in_bytes(size):>8}"


def in_bytes(count: float) -> str:
    """Such as ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def losses(numbers: Numbers) -> str:
    """By cause, the largest first."""
    lost = sorted(numbers.prompts.lost.items(), key=lambda item: -item[1])
    words = [
        f"{tokens:,} {cause.value}" + (f" ({kind.value})" if kind else "")
        for (cause, kind), tokens in lost
        if tokens
    ]
    return ", ".join(words) or "none"


def queue(numbers: Numbers) -> str:
    """Where requests are."""
    stages = [f"{numbers.stages[stage]} {stage.value}" for stage in Stage if numbers.stages[stage]]
    return ", ".join(stages) or "no requests"


def tokens(numbers: Numbers) -> str:
    """Prompt tokens: ideal, reused, replayed, lost."""
    totals = numbers.prompts
    lost = sum(totals.lost.values())
    replayed = max(totals.replayed.values(), default=0)
    restored = sum(
        count
        for (kind, tier), count in totals.restored.items()
        if kind is Kind.COMPRESSED and tier != Tier.DEVICE
    )
    return (
        f"{totals.tokens:,} prompt, {totals.ideal:,} ideal, {totals.reused:,} reused, "
        f"{restored:,} brought, {replayed:,} replayed, {lost:,} lost"
    )


def line(numbers: Numbers, rates: Rates) -> str:
    """Everything that changes, in one line of plain text."""
    used = [
        f"{tier_name(tier)} {numbers.pools[form, tier].occupancy:.0%}"
        for form, tier in numbers.pools
        if form == Form.BLOCK
    ]
    return (
        f"{rates.tokens_per_second:.1f} tokens/s | {queue(numbers)} | {tokens(numbers)} | "
        f"blocks {' '.join(used)}"
    )


def render(numbers: Numbers, rates: Rates) -> RenderableType:
    """The view: rates and requests, tokens, occupancy by kind and tier."""
    tiers = sorted({tier for _, tier in numbers.pools})
    table = Table(box=None, pad_edge=False)
    table.add_column("kind")
    for tier in tiers:
        table.add_column(tier_name(tier), justify="right")
    table.add_column("hit", justify="right")
    table.add_column("replayed", justify="right")
    for kind in numbers.place_bytes:
        table.add_row(
            kind.value,
            *(occupancy(numbers, kind, tier) for tier in tiers),
            f"{numbers.prompts.hit.get(kind, 0):,}",
            f"{numbers.prompts.replayed.get(kind, 0):,}",
        )
    head = (
        f"{rates.tokens_per_second:8.1f} tokens/s  {rates.prompt_tokens_per_second:8.1f} prompt "
        f"tokens/s  {queue(numbers)}"
    )
    rows = (head, tokens(numbers), f"lost: {losses(numbers)}")
    return Group(*(Text(row, no_wrap=True, overflow="ellipsis") for row in rows), table)


def height(numbers: Numbers) -> int:
    """Lines of ``render``."""
    return 4 + len(numbers.place_bytes)
