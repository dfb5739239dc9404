"""Metrics of an engine that has done something of everything: they are what was done."""

import collections
import http.client
import math
import threading
import time
import urllib.request

import numpy as np
import pytest
from bookkeeping import give_up
from engines import SLOTS, TILE, ids_of
from prometheus_client.parser import text_string_to_metric_families
from tiered_lab import lab_with_tiers

from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.transitions import TierState
from hybridkv.engine.requests import Finish
from hybridkv.kinds import Kind
from hybridkv.observe.metric import Type
from hybridkv.observe.numbers import measure, reader_of
from hybridkv.observe.prometheus import exposition, serve_metrics
from hybridkv.observe.table import AGE, METRICS
from hybridkv.prefixes.plan import Miss
from hybridkv.prefixes.policy import DENSE, NEVER
from hybridkv.tiers.durations import BOUNDS, Durations

LONG = ids_of(5 * TILE + 3, seed=1)
STATEMENTS = {
    "ideal tokens": "hybridkv_ideal_tokens_total",
    "hit tokens by kind": "hybridkv_hit_tokens_total{kind}",
    "restored tokens by kind and tier": "hybridkv_restored_tokens_total{kind,tier}",
    "replayed tokens by kind": "hybridkv_replayed_tokens_total{kind}",
    "lost tokens by cause and kind": "hybridkv_lost_tokens_total{cause,kind}",
    "restore latency": "hybridkv_restore_seconds{outcome}",
    "load latency by tier": "hybridkv_load_seconds{tier}",
    "occupancy by kind and tier": "hybridkv_occupancy_ratio{kind,tier}",
    "compression ratio": "hybridkv_compression_ratio{tier}",
    "index mismatch rate": "hybridkv_index_mismatch_ratio",
    "tail recomputation rate": "hybridkv_tail_recomputation_ratio",
    "fragmentation": "hybridkv_fragmentation_ratio{form,tier}",
    "queue length": "hybridkv_queue_length",
    "time to first token": "hybridkv_time_to_first_token_seconds",
    "inter-token time": "hybridkv_inter_token_seconds",
}
"""What the design's paragraph on observing asks for, and where it is."""


def page(engine):
    return samples_of(exposition(engine))


def samples_of(text):
    """Samples by name and labels; what the parser refuses fails."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(samples, name, **labels):
    return samples[(name, *sorted(labels.items()))]


def total(samples, name):
    return sum(number for (known, *_), number in samples.items() if known == name)


def mixed(lab, mover):
    """Hits, misses, replays, parts that differ, loads from host and disk, a late restore."""
    handles = [lab.submit(LONG, 5, policy=DENSE), lab.submit(ids_of(50, seed=2), 9, policy=NEVER)]
    lab.finish(*handles)
    forked = np.concatenate([LONG[:37], ids_of(30, seed=3)])
    replayed = np.concatenate([ids_of(50, seed=2), ids_of(20, seed=4)])
    handles += [lab.submit(forked, 3), lab.submit(replayed, 3), lab.submit(ids_of(9, seed=5), 2)]
    lab.finish(*handles)
    for gone, seed in ((Tier.DEVICE, 6), (Tier.HOST, 7)):
        lab.engine.drain()
        assert mover.flush(timeout_s=300)
        give_up(lab.engine.runner.allocator, *(tier for tier in Tier if tier <= gone))
        handles.append(lab.submit(np.concatenate([LONG, ids_of(20, seed=seed)]), 2))
        lab.finish(*handles)
    return handles


def test_ideal_is_reused_and_lost_and_every_number_is_what_the_outputs_say(lab, tmp_path):
    with lab_with_tiers(lab, tmp_path) as mover:
        handles = mixed(lab, mover)
        now, numbers = page(lab.engine), measure(lab.engine)
    outputs = [handle.output for handle in handles]
    plans = [output.plan for output in outputs]
    lost = total(now, "hybridkv_lost_tokens_total")
    assert lost > 0
    assert value(now, "hybridkv_ideal_tokens_total") == sum(plan.ideal for plan in plans)
    assert value(now, "hybridkv_ideal_tokens_total") == lost + value(
        now, "hybridkv_reused_tokens_total"
    )
    assert value(now, "hybridkv_reused_tokens_total") == sum(o.reused for o in outputs) > 0
    blamed = collections.Counter()
    for loss in (loss for plan in plans for loss in plan.losses):
        blamed[loss.cause.value, loss.kind.value if loss.kind else "none"] += loss.tokens
    for (cause, kind), tokens in blamed.items():
        assert value(now, "hybridkv_lost_tokens_total", cause=cause, kind=kind) == tokens
    assert value(now, "hybridkv_prompts_total") == len(outputs)
    assert value(now, "hybridkv_prompt_tokens_total") == sum(o.prompt_tokens for o in outputs)
    hits = sum(not isinstance(plan, Miss) for plan in plans)
    rebuilt = sum(o.replayed > 0 for o in outputs)
    assert 0 < rebuilt < hits < len(outputs)
    assert value(now, "hybridkv_tail_recomputation_ratio") == rebuilt / hits
    replayed = sum(o.replayed for o in outputs)
    for kind in ("window", "tail"):
        assert value(now, "hybridkv_replayed_tokens_total", kind=kind) == replayed
    assert value(now, "hybridkv_replayed_tokens_total", kind="compressed") == 0
    assert numbers.prompts.without_ideal == 0


def test_restored_tokens_come_from_the_tier_they_were_on(lab, tmp_path):
    with lab_with_tiers(lab, tmp_path) as mover:
        outputs = [handle.output for handle in mixed(lab, mover)]
        now = page(lab.engine)
        restored = {
            tier: value(now, "hybridkv_restored_tokens_total", kind="compressed", tier=tier)
            for tier in ("device", "host", "disk")
        }
        shared = sum(o.plan.shared for o in outputs if not isinstance(o.plan, Miss))
        assert restored["host"] == outputs[-2].plan.shared == outputs[-2].loaded == 5 * TILE
        assert restored["disk"] == outputs[-1].plan.shared == 5 * TILE
        assert sum(restored.values()) == shared
        state = [o.plan.start for o in outputs if not isinstance(o.plan, Miss)]
        copied = sum(
            value(now, "hybridkv_restored_tokens_total", kind="window", tier=tier)
            for tier in ("device", "host", "disk")
        )
        assert copied == sum(state) - sum(
            o.plan.start for o in outputs if not isinstance(o.plan, Miss) and o.plan.snapshot < 0
        )
        assert value(now, "hybridkv_restored_tokens_total", kind="window", tier="disk") > 0
        found = "hybridkv_hit_tokens_total"
        assert value(now, found, kind="compressed") >= shared
        assert value(now, found, kind="window") >= copied
        assert value(now, found, kind="disk_prefix") >= 5 * TILE
        assert value(now, "hybridkv_load_seconds_count", tier="host") == 1
        assert value(now, "hybridkv_load_seconds_count", tier="disk") == 1
        assert value(now, "hybridkv_restore_seconds_count", outcome="ready") == 2


def test_places_by_tier_are_those_of_the_allocator(lab, tmp_path):
    with lab_with_tiers(lab, tmp_path) as mover:
        mixed(lab, mover)
        lab.submit(ids_of(100, seed=9), 30)
        lab.steps(4)  # something is seated, leased and reserved
        now, allocator = page(lab.engine), lab.engine.runner.allocator
        columns, geometry = allocator.entries, lab.engine.runner.model.geometry
        for tier in Tier:
            for form in Form:
                labels = {"form": form.name.lower(), "tier": tier.name.lower()}
                here = (columns.state[tier] != TierState.ABSENT) & (columns.form == form)
                whole = (columns.state[tier] == TierState.PRESENT) & (columns.form == form)
                shown = np.count_nonzero(whole & columns.published)
                assert value(now, "hybridkv_used_places", **labels) == np.count_nonzero(here)
                assert value(now, "hybridkv_published_places", **labels) == shown
                can_go = allocator.evictable(form, tier)
                assert value(now, "hybridkv_evictable_places", **labels) == can_go
            blocks = value(now, "hybridkv_used_places", form="block", tier=tier.name.lower())
            rows = [
                value(now, "hybridkv_stored_bytes", kind=kind, tier=tier.name.lower())
                for kind in ("compressed", "indexer")
            ]
            assert sum(rows) == blocks * geometry.block_bytes
        used = value(now, "hybridkv_used_places", form="block", tier="device")
        ratio = value(now, "hybridkv_occupancy_ratio", kind="indexer", tier="device")
        assert 0 < ratio == used / 24
        disk = value(now, "hybridkv_stored_bytes", kind="disk_prefix", tier="disk")
        assert disk == mover.store.bytes_used
        assert value(now, "hybridkv_compression_ratio", tier="device") > 1
        lab.engine.reset()


def test_fragmentation_is_what_is_idle_and_can_not_be_given_away(lab):
    """A leased leaf keeps what stands under it, though nobody leases that."""
    lab.finish(lab.submit(LONG, 2))
    runner = lab.engine.runner
    run = runner.directory.find(runner.chain(LONG)).entries
    free = measure(lab.engine).pools[Form.BLOCK, Tier.DEVICE]
    assert free.fragmentation == 0
    leaf = runner.allocator.lease(run[-1:])
    pool = measure(lab.engine).pools[Form.BLOCK, Tier.DEVICE]
    assert pool.idle == free.idle - 1
    assert pool.evictable == free.evictable - len(run)
    assert math.isclose(
        pool.fragmentation, (len(run) - 1) / (pool.capacity - pool.used + pool.idle)
    )
    runner.allocator.release(leaf)


def test_tokens_are_timed_by_the_clock(lab):
    handle = lab.submit(ids_of(20, seed=1), 5)
    for _ in range(6):
        lab.time.now += 0.2
        lab.steps(1)
    assert handle.done
    now, output = page(lab.engine), handle.output
    assert value(now, "hybridkv_time_to_first_token_seconds_count") == 1
    first = value(now, "hybridkv_time_to_first_token_seconds_sum")
    assert first == output.first_token_s > 0
    assert value(now, "hybridkv_inter_token_seconds_count") == 4
    gaps = output.last_token_s - output.first_token_s
    assert value(now, "hybridkv_inter_token_seconds_sum") == pytest.approx(gaps)
    assert value(now, "hybridkv_inter_token_seconds_bucket", le="0.1") == 0
    assert value(now, "hybridkv_inter_token_seconds_bucket", le="0.25") == 4


def test_the_queue_is_who_has_no_seat(lab):
    handles = [lab.submit(ids_of(20, seed=n), 8) for n in range(SLOTS + 2)]
    lab.steps(1)
    now = page(lab.engine)
    assert value(now, "hybridkv_queue_length") == 2
    assert value(now, "hybridkv_requests_now", stage="waiting") == 2
    assert value(now, "hybridkv_free_slots") == 0
    lab.finish(*handles)
    assert value(page(lab.engine), "hybridkv_queue_length") == 0


def test_blocks_refused_for_their_index_count_over_those_looked_up(lab):
    lab.finish(lab.submit(LONG, 2))
    lab.engine.runner.allocator.entries.kinds[
        lab.engine.runner.directory.find(lab.engine.runner.chain(LONG)).entries[3:]
    ] ^= 2  # of five blocks, two lose their index
    lab.finish(lab.submit(np.concatenate([LONG, ids_of(4, seed=8)]), 2))
    now = page(lab.engine)
    assert value(now, "hybridkv_index_refused_blocks_total") == 2
    assert value(now, "hybridkv_index_mismatch_ratio") == 2 / 10
    hit = "hybridkv_hit_tokens_total"
    assert value(now, hit, kind="compressed") - value(now, hit, kind="indexer") == 2 * TILE


# The page.


def test_every_statement_of_the_design_has_a_metric_with_its_labels():
    known = {metric.name: metric for metric in METRICS}
    for statement, name in STATEMENTS.items():
        name, _, labels = name.partition("{")
        assert name in known, statement
        assert ",".join(known[name].labels) == labels.rstrip("}"), statement


def test_the_page_has_all_metrics_and_no_others(lab):
    families = list(text_string_to_metric_families(exposition(lab.engine).decode()))
    names = {f.name + ("_total" if f.type == "counter" else ""): f for f in families}
    assert set(names) == {metric.name for metric in METRICS} | {AGE}
    for metric in METRICS:
        family = names[metric.name]
        assert family.type == metric.type.value
        assert family.documentation == metric.help
        seen = {frozenset(s.labels) - {"le"} for s in family.samples}
        assert seen <= {frozenset(metric.labels)}, metric.name
        if metric.over:
            assert metric.over in names


def test_help_of_a_ratio_names_numerator_and_denominator():
    ratios = [metric for metric in METRICS if metric.name.endswith("_ratio")]
    assert len(ratios) == 5
    assert all(" / " in metric.help for metric in ratios)
    over = [metric for metric in METRICS if metric.over]
    assert over
    for metric in over:
        assert f"Over {metric.over}" in metric.help, metric.name
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(m.name.endswith("_total") == (m.type is Type.COUNTER) for m in METRICS)


def test_several_engines_have_their_names_on_one_page(lab):
    lab.finish(lab.submit(LONG, 2))
    now = page({"hybrid": lab.engine, "other": lab.engine})
    assert value(now, "hybridkv_prompts_total", engine="other") == 1
    assert value(now, "hybridkv_places", engine="hybrid", form="block", tier="device") == 24


def test_a_page_is_served_over_http_and_the_port_is_given_back(lab):
    with serve_metrics(lab.engine, 0) as server:
        assert server.url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(server.url) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            assert b"hybridkv_prompts_total 0.0" in answer.read()
        port = int(server.url.rpartition(":")[2].partition("/")[0])
    again = serve_metrics(lab.engine, port)
    again.close()
    with pytest.raises(ConnectionError):
        http.client.HTTPConnection("127.0.0.1", port).request("GET", "/metrics")


# From other threads.


def test_a_page_read_while_the_engine_runs_is_of_one_moment(lab):
    """Sums agree on each page, and counters never go back."""
    pages, ended, faults = [], threading.Event(), []

    def scrape():
        try:
            while not ended.is_set():
                pages.append(exposition(lab.engine))
        except Exception as error:
            faults.append(error)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        for n in range(400):
            prompt = np.concatenate([LONG[: 16 * (n % 6)], ids_of(20, seed=n)])
            lab.finish(lab.submit(prompt, 4))
            if len({now[:4000] for now in list(pages)}) > 4 or faults:
                break
        lab.engine.drain()
    finally:
        ended.set()
        thread.join()
    assert faults == []
    assert len({now[:4000] for now in pages}) > 4
    before, now = -1, {}
    for now in map(samples_of, pages):
        reused = value(now, "hybridkv_reused_tokens_total")
        lost = total(now, "hybridkv_lost_tokens_total")
        assert value(now, "hybridkv_ideal_tokens_total") == reused + lost
        ended_now = total(now, "hybridkv_finished_total")
        running = total(now, "hybridkv_requests_now")
        assert value(now, "hybridkv_requests_total") == ended_now + running
        assert before <= ended_now
        before = ended_now
    assert value(now, "hybridkv_numbers_age_seconds") < 1.0


class Slow:
    """Stands for an engine in the middle of a long turn."""

    def __init__(self, engine):
        self.engine, self.began, self.go = engine, threading.Event(), threading.Event()

    def __call__(self):
        self.began.set()
        assert self.go.wait(20)


def test_in_a_long_turn_the_last_numbers_are_served_with_their_age(lab, monkeypatch):
    reader = reader_of(lab.engine)
    before = reader.read()
    slow = Slow(lab.engine)
    monkeypatch.setattr(lab.engine.seating, "turn_tiers", lambda **_: slow())
    thread = threading.Thread(target=lab.engine.step)
    thread.start()
    try:
        assert slow.began.wait(20)
        assert reader.read(wait_s=0.05) is before
    finally:
        slow.go.set()
        thread.join()
    assert reader.read() is not before


def test_an_engine_that_is_always_busy_answers_by_itself(lab):
    """Between two turns on its own thread: whoever asks never finds the lock free."""
    reader, found = reader_of(lab.engine), []
    before = reader.read()
    with lab.engine.turn_lock:
        thread = threading.Thread(target=lambda: found.append(reader.read(wait_s=20)))
        thread.start()
        while not reader._wanted:
            time.sleep(1e-3)
        for tell in lab.engine.on_turn:
            tell()
        thread.join(20)
    assert len(found) == 1
    assert found[0] is not before


def test_nobody_asks_and_nothing_is_measured(lab, monkeypatch):
    reader_of(lab.engine).read()
    calls = []
    monkeypatch.setattr("hybridkv.observe.numbers.measure", lambda engine: calls.append(engine))
    lab.finish(lab.submit(LONG, 4))
    assert calls == []


def test_durations_count_each_note_in_the_range_it_belongs_to():
    durations = Durations()
    for seconds in (0.0, BOUNDS[0], BOUNDS[0] * 1.01, 1e9):
        durations.note(seconds)
    copy = durations.copy()
    durations.note(1.0)
    assert copy.counts == [2, 1] + [0] * (len(BOUNDS) - 2) + [1]
    assert copy.count == 4
    assert durations.count == 5


def test_finished_requests_count_by_reason(lab):
    handle = lab.submit(LONG, 20)
    lab.steps(3)
    handle.cancel()
    assert measure(lab.engine).counters.ended[Finish.CANCELLED] == 1
    assert value(page(lab.engine), "hybridkv_finished_total", reason="cancelled") == 1
    assert Kind.TAIL in measure(lab.engine).place_bytes
