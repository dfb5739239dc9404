"""Every metric: its name, what it counts over what, how it is read, and where it is shown.

Everything that is served, drawn or documented comes from ``METRICS``. Counters count from the start
of the engine; a ratio of counters is of the time since then, and a dashboard takes the rates of its
numerator and denominator instead.
"""

from collections.abc import Iterable

from hybridkv.blocks.entries import FORM_BITS, Form, Tier, kinds_of
from hybridkv.kinds import Kind
from hybridkv.observe.metric import (
    Metric,
    Sample,
    by_kind,
    by_tier,
    counter,
    duration,
    gauge,
    histogram,
    one,
    pools,
    tier_name,
)
from hybridkv.observe.numbers import Numbers
from hybridkv.prefixes.losses import Cause

NO_KIND = "none"
"""The kind of a loss that no kind is to blame for."""
_FORM_OF = {kind: form for form in Form for kind in kinds_of(FORM_BITS[form])}


def _lost(numbers: Numbers) -> Iterable[Sample]:
    lost = {(cause, None): 0 for cause in Cause} | dict(numbers.prompts.lost)
    return [((c.value, k.value if k else NO_KIND), n) for (c, k), n in lost.items()]


def _restored(numbers: Numbers) -> Iterable[Sample]:
    restored = numbers.prompts.restored
    return [((k.value, tier_name(t)), restored.get((k, t), 0)) for k in Kind for t in Tier]


def _occupancy(numbers: Numbers) -> Iterable[Sample]:
    kinds = [kind for kind in numbers.place_bytes if kind in _FORM_OF]
    return [
        ((kind.value, tier_name(tier)), pool.occupancy)
        for (form, tier), pool in numbers.pools.items()
        for kind in kinds
        if _FORM_OF[kind] == form
    ]


def _stored_bytes(numbers: Numbers) -> Iterable[Sample]:
    tiers = {tier for _, tier in numbers.pools}
    found = [
        ((kind.value, tier_name(tier)), float(numbers.stored_bytes(kind, tier)))
        for kind in numbers.place_bytes
        for tier in sorted(tiers)
    ]
    if Tier.DISK in tiers:
        found.append(((Kind.DISK_PREFIX.value, "disk"), float(numbers.store_bytes)))
    return found


_REUSE, _TIME, _ROOM, _TIERS, _WORK = "Reuse", "Latency", "Room", "Tiers", "Requests"

PROMPTS = (
    counter(
        "prompts",
        "Prompts that got a seat; each is counted once, by the plan it began with.",
        one(lambda n: n.prompts.prompts),
        row=_REUSE,
    ),
    counter(
        "prompt_tokens",
        "Tokens of those prompts.",
        one(lambda n: n.prompts.tokens),
        row=_REUSE,
    ),
    counter(
        "ideal_tokens",
        "Tokens that reuse could have spared: the longest common prefix of each prompt with "
        "anything ever computed in its namespace, at most its tokens minus 1. Equals the reused of "
        "these prompts plus the lost ones. Over hybridkv_prompt_tokens_total: the ideal hit rate.",
        one(lambda n: n.prompts.ideal),
        row=_REUSE,
        unit="percentunit",
        over="prompt_tokens",
    ),
    counter(
        "reused_tokens",
        "Prompt tokens that were not computed. Over hybridkv_prompt_tokens_total: the hit rate.",
        one(lambda n: n.prompts.reused),
        row=_REUSE,
        unit="percentunit",
        over="prompt_tokens",
    ),
    counter(
        "lost_tokens",
        "Ideal minus reused tokens, each once, by cause and the kind to blame. Over "
        "hybridkv_ideal_tokens_total: the share of the ideal that is lost.",
        _lost,
        "cause",
        "kind",
        row=_REUSE,
        unit="percentunit",
        over="ideal_tokens",
    ),
    counter(
        "prompts_without_ideal",
        "Prompts whose ideal is not known because the engine keeps no ledger; they are in no count "
        "of ideal and lost tokens.",
        one(lambda n: n.prompts.without_ideal),
        row=_REUSE,
    ),
    counter(
        "hit_tokens",
        "Prompt tokens up to which a kind was found, whatever the other kinds had. Over "
        "hybridkv_prompt_tokens_total: the hit rate of the kind by itself.",
        by_kind(lambda n: n.prompts.hit),
        "kind",
        row=_REUSE,
        unit="percentunit",
        over="prompt_tokens",
    ),
    counter(
        "restored_tokens",
        "Prompt tokens up to which a kind was taken from a tier instead of being computed. Over "
        "hybridkv_hit_tokens_total of the kind: how much of its hits was of use.",
        _restored,
        "kind",
        "tier",
        row=_REUSE,
    ),
    counter(
        "replayed_tokens",
        "Prompt tokens that were computed again only to rebuild a kind, although their rows were "
        "stored.",
        by_kind(lambda n: n.prompts.replayed),
        "kind",
        row=_REUSE,
    ),
    counter(
        "hits",
        "Prompts of which anything was reused or read. Over hybridkv_prompts_total: the share of "
        "prompts with a hit.",
        one(lambda n: n.prompts.hits),
        row=_REUSE,
        unit="percentunit",
        over="prompts",
    ),
    counter(
        "rebuilt_prompts",
        "Prompts with a hit whose sequence state (tail and window) was recomputed, all or in part. "
        "Over hybridkv_hits_total: the tail recomputation rate.",
        one(lambda n: n.prompts.rebuilt),
        row=_REUSE,
        unit="percentunit",
        over="hits",
    ),
    gauge(
        "tail_recomputation_ratio",
        "hybridkv_rebuilt_prompts_total / hybridkv_hits_total, since the start.",
        one(lambda n: n.tail_recomputation),
        row=_REUSE,
        unit="percentunit",
    ),
    counter(
        "looked_up_blocks",
        "Complete blocks of prompts that were asked for.",
        one(lambda n: n.prompts.looked_up),
        row=_REUSE,
    ),
    counter(
        "index_refused_blocks",
        "Blocks that were found and refused for their index: it is missing beside whole compressed "
        "rows, or its bytes are not those that were put away. Over "
        "hybridkv_looked_up_blocks_total: the index mismatch rate.",
        one(lambda n: n.prompts.refused + n.tiers.refused[Kind.INDEXER]),
        row=_REUSE,
        unit="percentunit",
        over="looked_up_blocks",
    ),
    gauge(
        "index_mismatch_ratio",
        "hybridkv_index_refused_blocks_total / hybridkv_looked_up_blocks_total, since the start.",
        one(lambda n: n.index_mismatch),
        row=_REUSE,
        unit="percentunit",
    ),
)

LATENCIES = (
    histogram(
        "time_to_first_token",
        "From the submission of a request to its first token, one note an output.",
        duration(lambda n: n.counters.first_token),
        row=_TIME,
    ),
    histogram(
        "inter_token",
        "Between two tokens of one output.",
        duration(lambda n: n.counters.between_tokens),
        row=_TIME,
    ),
    histogram(
        "restore",
        "How long a request waited for its prefix to be brought, by how that ended: ready (all of "
        "it), failed (less), late (its deadline passed).",
        lambda n: [((end,), each) for end, each in n.counters.restore_seconds.items()],
        "outcome",
        row=_TIME,
    ),
    histogram(
        "load",
        "From the request of a load to its last write to the device, of loads that brought "
        "everything, by the slowest tier that they read.",
        lambda n: [((tier_name(t),), each) for t, each in n.tiers.load_seconds.items()],
        "tier",
        row=_TIME,
    ),
)

ROOM = (
    gauge(
        "places",
        "Places of a form on a tier.",
        pools(lambda n, form, tier: n.pools[form, tier].capacity),
        "form",
        "tier",
        row=_ROOM,
    ),
    gauge(
        "used_places",
        "Places that entries have.",
        pools(lambda n, form, tier: n.pools[form, tier].used),
        "form",
        "tier",
        row=_ROOM,
    ),
    gauge(
        "reserved_places",
        "Places that are promised and not taken yet.",
        pools(lambda n, form, tier: n.pools[form, tier].reserved),
        "form",
        "tier",
        row=_ROOM,
    ),
    gauge(
        "published_places",
        "Used places of published entries whose bytes are whole there.",
        pools(lambda n, form, tier: n.pools[form, tier].published),
        "form",
        "tier",
        row=_ROOM,
    ),
    gauge(
        "evictable_places",
        "Published places that could be given up now, one after the other.",
        pools(lambda n, form, tier: n.pools[form, tier].evictable),
        "form",
        "tier",
        row=_ROOM,
    ),
    gauge(
        "occupancy_ratio",
        "Used places / places of the form that holds a kind, by kind and tier.",
        _occupancy,
        "kind",
        "tier",
        row=_ROOM,
        unit="percentunit",
    ),
    gauge(
        "fragmentation_ratio",
        "1 - largest allocatable / free. Free: places that nobody uses, empty and not promised or "
        "of idle published entries. Largest allocatable: the largest reservation that would now "
        "succeed, empty places that are not promised and evictable ones.",
        pools(lambda n, form, tier: n.pools[form, tier].fragmentation),
        "form",
        "tier",
        row=_ROOM,
        unit="percentunit",
    ),
    gauge(
        "stored_bytes",
        "Bytes of a kind in used places of a tier; of disk_prefix, of all files of the store.",
        _stored_bytes,
        "kind",
        "tier",
        row=_ROOM,
        unit="bytes",
    ),
    gauge(
        "raw_bytes",
        "Bytes that the tokens of a tier's used blocks would take as uniform raw rows.",
        lambda n: [((tier_name(t),), n.raw_bytes(t)) for t in _tiers(n)],
        "tier",
        row=_ROOM,
        unit="bytes",
    ),
    gauge(
        "compression_ratio",
        "Raw bytes / stored bytes of a tier: hybridkv_raw_bytes / its blocks and snapshots, on the "
        "disk / all files of the store.",
        lambda n: [((tier_name(t),), n.compression(t)) for t in _tiers(n)],
        "tier",
        row=_ROOM,
    ),
)


def _tiers(numbers: Numbers) -> list[Tier]:
    return sorted({tier for form, tier in numbers.pools if form == Form.BLOCK})


TIERS = (
    counter(
        "stored_entries",
        "Blocks and snapshots that got a copy on a tier.",
        by_tier(lambda n: n.tiers.stored),
        "tier",
        row=_TIERS,
    ),
    counter(
        "written_bytes",
        "Bytes of those copies.",
        by_tier(lambda n: n.tiers.stored_bytes),
        "tier",
        row=_TIERS,
        unit="Bps",
    ),
    counter(
        "loaded_entries",
        "Blocks and snapshots that were brought to the device from a tier.",
        by_tier(lambda n: n.tiers.loaded),
        "tier",
        row=_TIERS,
    ),
    counter(
        "loaded_bytes",
        "Bytes of those, and of what was read for loads that then failed.",
        by_tier(lambda n: n.tiers.loaded_bytes),
        "tier",
        row=_TIERS,
        unit="Bps",
    ),
    counter(
        "spoiled_entries",
        "Copies on a tier whose bytes could not be used.",
        by_tier(lambda n: n.tiers.spoiled),
        "tier",
        row=_TIERS,
    ),
    counter(
        "refused_entries",
        "Copies that were refused for the bytes of one kind.",
        by_kind(lambda n: n.tiers.refused),
        "kind",
        row=_TIERS,
    ),
    counter(
        "failed_stores",
        "Copies to a tier that failed.",
        by_tier(lambda n: n.tiers.failed_stores),
        "tier",
        row=_TIERS,
    ),
    counter(
        "no_room",
        "Copies that found no room on a tier.",
        by_tier(lambda n: n.tiers.no_room),
        "tier",
        row=_TIERS,
    ),
    counter(
        "loads",
        "Requests that had something brought.",
        one(lambda n: n.tiers.loads),
        row=_TIERS,
    ),
    counter(
        "failed_loads",
        "Loads that failed. Over hybridkv_loads_total: the failure rate.",
        one(lambda n: n.tiers.failed_loads),
        row=_TIERS,
        unit="percentunit",
        over="loads",
    ),
    counter(
        "dropped_prefixes",
        "Prefixes that were not stored: too many waited, or they can't be read or written.",
        one(lambda n: n.tiers.dropped_prefixes),
        row=_TIERS,
    ),
    gauge(
        "store_queue_length",
        "Prefixes that wait to be stored, by the tier they wait for.",
        by_tier(lambda n: n.store_queues),
        "tier",
        row=_TIERS,
    ),
)

WORK = (
    counter(
        "requests",
        "Outputs that were asked for.",
        one(lambda n: n.counters.submitted),
        row=_WORK,
    ),
    counter(
        "finished",
        "Outputs that ended, by why.",
        lambda n: [((f.value.replace(" ", "_"),), count) for f, count in n.counters.ended.items()],
        "reason",
        row=_WORK,
    ),
    gauge(
        "requests_now",
        "Requests by where they are.",
        lambda n: [((stage.value,), count) for stage, count in n.stages.items()],
        "stage",
        row=_WORK,
    ),
    gauge(
        "queue_length",
        "Requests without a seat: new, parked, or waiting for their prefix.",
        one(lambda n: n.queue),
        row=_WORK,
    ),
    gauge("slots", "Seats.", one(lambda n: n.slots), row=_WORK),
    gauge(
        "free_slots",
        "Seats that no sequence has.",
        one(lambda n: n.free_slots),
        row=_WORK,
    ),
    gauge(
        "idle_queue_length",
        "Requests whose generated tokens wait to be published.",
        one(lambda n: n.idle_queue),
        row=_WORK,
    ),
    counter(
        "computed_tokens",
        "Prompt tokens that went through tile steps, replayed ones and repeated attempts included.",
        one(lambda n: n.counters.computed_tokens),
        row=_WORK,
    ),
    counter(
        "new_tokens",
        "Generated tokens.",
        one(lambda n: n.counters.new_tokens),
        row=_WORK,
    ),
    counter("turns", "Turns that computed something.", one(lambda n: n.counters.turns), row=_WORK),
    counter(
        "preemptions",
        "Times a seat was taken away.",
        one(lambda n: n.counters.preemptions),
        row=_WORK,
    ),
    counter(
        "lost_states",
        "Parked sequences whose bytes were damaged: their outputs are not exact.",
        one(lambda n: n.counters.lost_states),
        row=_WORK,
    ),
    counter(
        "failed_restores",
        "Restores that failed, by an exception or by their state.",
        one(lambda n: n.counters.failed_restores),
        row=_WORK,
    ),
    counter(
        "compilations",
        "Compilations after warm-up; anything but 0 is a fault.",
        one(lambda n: n.counters.compilations),
        row=_WORK,
    ),
)

METRICS: tuple[Metric, ...] = (*PROMPTS, *LATENCIES, *ROOM, *TIERS, *WORK)
AGE = "hybridkv_numbers_age_seconds"
"""A gauge of the exposition itself: how old the numbers are, where the engine did not answer."""
