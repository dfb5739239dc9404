"""A prefix that was saved is found by another process, whole, or refused by one line."""

import dataclasses

import jax
import numpy as np
import pytest
from engines import BLOCKS, TILE, ids_of, same
from orbax.checkpoint import v1 as ocp
from toy import digest

from hybridkv.blocks.entries import Form
from hybridkv.engine.generated import Publish
from hybridkv.engine.runner import Runner
from hybridkv.engine.saving import SavedPrefix, load_prefix, save_prefix
from hybridkv.prefixes.plan import Outcome
from hybridkv.prefixes.policy import DENSE
from hybridkv.tiers.record import PrefixRefused

HEAD = ids_of(4 * TILE, seed=1)
PROMPT = np.concatenate([HEAD, ids_of(7, seed=2)])
FORK = np.concatenate([HEAD[: 3 * TILE], ids_of(9, seed=3)])


def store(lab, path, **more):
    """A prompt's prefix on disk, and an engine that knows nothing of it."""
    lab.submit(PROMPT, 3, policy=DENSE).result()
    saved = save_prefix(path, lab.engine, PROMPT, **more)
    lab.engine.reset()
    return saved


def nothing_is_published(lab):
    runner = lab.engine.runner
    assert len(runner.directory) == 0
    assert runner.allocator.available(Form.BLOCK) == BLOCKS
    assert not runner.allocator.reservations.left


def refused(lab, path, text, **more):
    with pytest.raises(PrefixRefused, match=text) as caught:
        load_prefix(path, lab.engine, **more)
    assert "\n" not in str(caught.value)
    nothing_is_published(lab)


@pytest.mark.parametrize("ids", [PROMPT, FORK], ids=["again", "a fork"])
def test_who_finds_it_after_a_restart_has_the_bits_of_a_cold_run(lab, tmp_path, ids):
    alone = lab.alone(ids, 6)
    saved = store(lab, tmp_path / "saved")
    assert (len(saved.tokens), saved.positions, saved.cut) == (64, (16, 32, 48, 64), "")
    assert load_prefix(tmp_path / "saved", lab.engine) == 64
    output = lab.submit(ids, 6).result()
    assert output.plan.outcome is Outcome.REUSE
    assert output.reused == len(ids) // TILE * TILE == output.plan.ideal
    assert same(output, alone)
    assert output.exact
    lab.engine.drain()


def test_what_the_engine_has_already_stays_and_is_not_loaded_twice(lab, tmp_path):
    alone = lab.alone(PROMPT, 6)
    store(lab, tmp_path / "saved")
    runner = lab.engine.runner
    lab.submit(FORK, 1).result()
    before = runner.directory.find(runner.chain(PROMPT)).entries.tolist()
    assert len(before) == 3
    assert load_prefix(tmp_path / "saved", runner) == 64
    after = runner.directory.find(runner.chain(PROMPT)).entries.tolist()
    assert after[:3] == before
    assert len(after) == 4
    free = runner.allocator.available(Form.BLOCK)
    assert load_prefix(tmp_path / "saved", runner) == 64
    assert runner.allocator.available(Form.BLOCK) == free
    assert same(lab.submit(PROMPT, 6).result(), alone)
    lab.engine.drain()


def test_nothing_compiles(lab, tmp_path):
    lab.submit(PROMPT, 3, policy=DENSE).result()
    lab.engine._guard.check()
    saved = SavedPrefix(lab.engine, PROMPT)
    lab.engine.reset()
    saved.restore(lab.engine)
    assert lab.engine._guard.check() == 0


def test_a_byte_that_changed_in_a_file_is_found_and_nothing_is_published(lab, tmp_path):
    """In every file of the prefix; ``test_record_prefix`` has more of them."""
    path = tmp_path / "saved"
    store(lab, path)
    files = [file for file in (path / "prefix").rglob("*") if file.is_file()]
    assert len(files) == 1 + 2 * 5
    for file in files:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(bytes(data))
        refused(lab, path, "digest|checksum")
        data[len(data) // 2] ^= 4
        file.write_bytes(bytes(data))
    assert load_prefix(path, lab.engine) == 64


@pytest.mark.parametrize("part", ["geometry", "weights", "layout", "numerics"])
def test_a_prefix_of_other_weights_or_steps_is_refused_by_its_parts(
    lab, tmp_path, monkeypatch, part
):
    store(lab, tmp_path / "saved")
    runner = lab.engine.runner
    other = dataclasses.replace(runner.identity, **{part: "another"})
    monkeypatch.setattr(runner, "identity", other)
    refused(lab, tmp_path / "saved", rf"another identity \({part} differ\)")


def test_namespaces_do_not_see_each_others(lab, tmp_path):
    lab.submit(PROMPT, 3, policy=DENSE, namespace="a").result()
    with pytest.raises(PrefixRefused, match="nothing of these 71 tokens"):
        save_prefix(tmp_path / "none", lab.engine, PROMPT)
    save_prefix(tmp_path / "saved", lab.engine, PROMPT, namespace="a")
    lab.engine.reset()
    refused(lab, tmp_path / "saved", "not of namespace 'b'", namespace="b")
    assert load_prefix(tmp_path / "saved", lab.engine, namespace="a") == 64


def test_what_is_no_prefix_is_refused(lab, tmp_path):
    refused(lab, tmp_path / "nowhere", "holds no prefix")
    refused(lab, tmp_path, "holds no prefix")
    ocp.save(tmp_path / "model", {"w": np.ones(3)})
    refused(lab, tmp_path / "model", "holds no prefix")
    with pytest.raises(PrefixRefused, match="empty: load one"):
        SavedPrefix().restore(lab.engine)


def test_an_existing_folder_is_not_written_over(lab, tmp_path):
    lab.submit(PROMPT, 3).result()
    (tmp_path / "saved").mkdir()
    with pytest.raises(PrefixRefused, match="exists already"):
        save_prefix(tmp_path / "saved", lab.engine, PROMPT)
    (tmp_path / "file").touch()
    with pytest.raises(PrefixRefused, match="can't write") as caught:
        save_prefix(tmp_path / "file" / "saved", lab.engine, PROMPT)
    assert "\n" not in str(caught.value)
    lab.engine.drain()


def test_without_room_for_all_of_it_nothing_is_published(lab, tmp_path):
    store(lab, tmp_path / "saved")
    allocator = lab.engine.runner.allocator
    for blocks, snapshots in ((BLOCKS - 3, 0), (0, 4)):
        held = allocator.reserve(blocks=blocks, snapshots=snapshots)
        with pytest.raises(PrefixRefused, match="no room for the prefix"):
            load_prefix(tmp_path / "saved", lab.engine)
        allocator.cancel(held)
        nothing_is_published(lab)
    assert load_prefix(tmp_path / "saved", lab.engine) == 64


def test_a_write_that_fails_half_way_publishes_nothing(lab, tmp_path, monkeypatch):
    store(lab, tmp_path / "saved")

    def fails(*_):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(lab.engine.runner.steps, "store_snapshot", fails)
    with pytest.raises(RuntimeError, match="the device is gone"):
        load_prefix(tmp_path / "saved", lab.engine)
    nothing_is_published(lab)


def test_it_ends_where_the_bits_of_prompts_end_and_says_so(lab, tmp_path):
    output = lab.submit(PROMPT, 30, publish=Publish.AS_DECODED).result()
    longer = np.concatenate([PROMPT, np.asarray(output.tokens, np.int32)])
    saved = SavedPrefix(lab.engine, longer)
    assert len(saved.tokens) == 64
    assert saved.cut.startswith("the block at 64 is not as prompts make it")
    lab.engine.reset()
    lab.submit(PROMPT, 1).result()
    saved = SavedPrefix(lab.engine, longer)
    assert saved.cut == "the block at 64 is not published (never_published)"
    lab.engine.drain()


def root_of(error):
    """The first of a chain of errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def test_it_is_saved_and_loaded_in_a_checkpoint_with_a_model(lab, tmp_path):
    """The engine goes on while it is written."""
    alone = lab.alone(PROMPT, 6)
    model = {"w": np.arange(6.0, dtype=np.float32)}
    lab.submit(PROMPT, 3, policy=DENSE).result()
    response = ocp.save_checkpointables_async(
        tmp_path / "step_1", {"model": model, "system": SavedPrefix(lab.engine, PROMPT)}
    )
    lab.engine.runner.allocator.evict(blocks=4)
    lab.submit(ids_of(90, seed=8), 4).result()
    response.result()
    lab.engine.drain()
    lab.engine.reset()

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {"w": jax.ShapeDtypeStruct((6,), np.float32, sharding=here)}
    prefix = SavedPrefix()
    loaded = ocp.load_checkpointables(tmp_path / "step_1", {"model": like, "system": prefix})
    np.testing.assert_array_equal(loaded["model"]["w"], model["w"])
    assert loaded["system"] is prefix
    assert prefix.restore(lab.engine) == 64
    output = lab.submit(PROMPT, 6).result()
    assert output.reused == 64
    assert same(output, alone)
    lab.engine.drain()
    lab.engine.reset()
    assert load_prefix(tmp_path / "step_1", lab.engine, name="system") == 64

    chunk = tmp_path / "step_1" / "system" / "state" / "blocks_0" / "c" / "0" / "0"
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(bytes(data))
    damaged = SavedPrefix()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Orbax wraps it as it likes
        ocp.load_checkpointables(tmp_path / "step_1", {"system": damaged})
    assert "does not have its digest" in str(root_of(caught.value))
    with pytest.raises(PrefixRefused, match="empty"):
        damaged.restore(lab.engine)


def test_it_is_a_checkpointable_of_orbax():
    assert isinstance(SavedPrefix(), ocp.StatefulCheckpointable)
    assert SavedPrefix().nbytes == 0


def test_a_runner_of_another_capacity_reads_it(lab, tmp_path):
    """What is on disk does not depend on places: half the pool is taken when it is loaded."""
    runner = lab.engine.runner
    assert isinstance(runner, Runner)
    store(lab, tmp_path / "saved")
    other = runner.start(ids_of(9 * TILE, seed=6))
    runner.prefill(other)
    assert load_prefix(tmp_path / "saved", runner) == 64
    sequence = runner.start(PROMPT, max_new_tokens=2)
    warm = digest(runner.prefill(sequence))
    for each in (sequence, other):
        runner.finish(each)
    runner.reset()
    cold = runner.start(PROMPT, max_new_tokens=2)
    assert cold.start == 0
    assert digest(runner.prefill(cold)) == warm
    runner.finish(cold)
