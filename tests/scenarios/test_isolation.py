"""No byte of another tenant, model, adapter or picture; collisions are found out."""

import dataclasses

import numpy as np
import pytest
from shelves import Shelf
from toy import TOY, toy_options, toy_runtime

from hybridkv import formats
from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import Form, Tier, kind_bits
from hybridkv.blocks.eviction import LeastRecentlyUsed
from hybridkv.blocks.invariants import check
from hybridkv.blocks.pools import PoolSizes
from hybridkv.engine.numerics import numerics_id
from hybridkv.errors import UserError
from hybridkv.kinds import Kind
from hybridkv.prefixes.directory import Directory
from hybridkv.prefixes.hashing import TokenChain, sha256_block
from hybridkv.prefixes.identity import Identity, weights_digest
from hybridkv.prefixes.plan import Miss, Plan, PlanOptions, plan_prefix
from hybridkv.prefixes.policy import DENSE
from models.deepseek_v4.config import Rope
from models.deepseek_v4.runtime import DeepseekV4Runtime
from models.deepseek_v4.toy import toy_model
from scenarios.runs import (
    GEOMETRY,
    Bench,
    counting_runner,
    joined,
    plan_on,
    request,
    start_of,
    tokens,
)

OURS = Identity.of_geometry(GEOMETRY, weights="w", numerics="n")


def test_b208_other_weights_of_the_same_shapes_are_another_identity():
    ours, theirs = ({"a": np.zeros((2, 3), np.float32)} for _ in range(2))
    theirs["a"][1, 2] = 1e-30
    assert weights_digest(ours) != weights_digest(theirs)
    one, two = (weights_digest(DeepseekV4Runtime(toy_model(seed=s)).params) for s in (0, 1))
    assert one != two
    shelf, ids = Shelf(GEOMETRY), tokens(65, 1)
    shelf.store(ids, snapshots=(64,))
    options = PlanOptions(tile=16)
    other = dataclasses.replace(shelf.identity, weights=two)
    found = plan_prefix(
        shelf.directory, shelf.chain(ids), GEOMETRY, options, identity=other, ideal=64
    )
    assert isinstance(found, Miss)
    assert "weights differ" in found.reason


@pytest.mark.parametrize(
    "change",
    [{"compressed_rope": Rope(theta=20000.0)}, {"rope": Rope(theta=9999.0)}, {"norm_eps": 2e-6}],
    ids=["compressed rope", "rope", "epsilon"],
)
def test_b209_a_constant_of_the_model_that_changes_its_rows_changes_the_identity(change):
    options = toy_options(tile=16)
    changed = dataclasses.replace(TOY, **change)
    assert numerics_id(DeepseekV4Runtime(toy_model(changed)), options) != numerics_of_toy(options)


def numerics_of_toy(options, known={}):  # noqa: B006 - lowering takes seconds
    if options not in known:
        known[options] = numerics_id(toy_runtime(), options)
    return known[options]


def test_b210_a_prompt_is_known_by_its_tokens_however_they_are_given(bench):
    namespace = bench.namespace()
    ids, after = bench.ids(40), bench.ids(2)
    bench.run(ids, after, namespace, policy=DENSE)
    runner = bench.runner
    for same in (ids.astype(np.int64), ids.astype(np.uint16), ids[:]):
        grown = runner.directory.chain(namespace)
        for part in np.array_split(same, 7):
            grown.extend(part)
        assert start_of(runner.plan(grown, namespace=namespace)) == 32


def test_b226_an_adapter_is_not_a_salt_of_the_same_name():
    adapter = dataclasses.replace(OURS, extra=(("adapter", "X"),))
    salt = dataclasses.replace(OURS, extra=(("salt", "X"),))
    both = dataclasses.replace(OURS, extra=(("adapter", ""), ("salt", "X")))
    roots = {
        identity.root(space) for identity in (OURS, adapter, salt, both) for space in ("", "X")
    }
    assert len(roots) == 8


def test_b228_an_adapter_is_its_name_and_version_and_not_its_turn():
    names = ("legal 1", "legal 2", "medical 1")
    roots = {n: dataclasses.replace(OURS, extra=(("adapter", n),)).root("") for n in names}
    again = {n: dataclasses.replace(OURS, extra=(("adapter", n),)).root("") for n in names[::-1]}
    assert len(set(roots.values())) == 3
    assert roots == again
    ordered = dataclasses.replace(OURS, extra=(("b", "1"), ("a", "2")))
    assert ordered.root("") == dataclasses.replace(OURS, extra=(("a", "2"), ("b", "1"))).root("")


def test_b229_names_that_agree_in_their_first_bits_are_told_apart():
    one, two = (
        dataclasses.replace(OURS, extra=(("image", "ab" + end),)).root("") for end in ("0", "1")
    )
    assert one != two
    chain, other = (TokenChain(OURS.root(""), 16) for _ in range(2))
    chain.extend(np.full(64, 5))
    other.extend(np.full(64, 5 + 2**16))
    assert not (chain.digests == other.digests).all(axis=1).any()
    # Equal blocks at different positions are different prefixes.
    assert len({row.tobytes() for row in chain.digests}) == 4


def test_b230_the_same_placeholders_with_another_picture_share_nothing():
    runner = counting_runner(blocks=20)
    ids = tokens(64, 1)
    request(runner, ids, namespace="picture 1")
    assert isinstance(request(runner, ids, namespace="picture 2"), Miss)
    assert start_of(request(runner, ids, namespace="picture 1")) == 48
    with pytest.raises(UserError, match="give strings"):
        dataclasses.replace(OURS, extra=(("image", None),))
    with pytest.raises(UserError, match="give a string"):
        OURS.root(None)


def test_b232_the_hash_is_a_cryptographic_one_over_everything_before():
    chain = TokenChain(OURS.root("a"), 16)
    chain.extend(tokens(48, 1))
    previous = OURS.root("a")
    for number in range(3):
        part = chain.tokens[16 * number : 16 * (number + 1)].astype("<u4").tobytes()
        previous = sha256_block(previous, part)
        assert chain.digests[number].tobytes() == previous
    assert len(previous) == 32


class Colliding(Shelf):
    """A shelf of which every second digest is that of every other prompt."""

    def __init__(self, hash_block, blocks=16):
        self.geometry, self.now, self.identity = GEOMETRY, 0.0, OURS
        self.allocator = Allocator(
            {Tier.DEVICE: PoolSizes(blocks=blocks, snapshots=4)},
            policy=LeastRecentlyUsed(),
            clock=lambda: self.now,
            debug=True,
        )
        every = (Kind.COMPRESSED, Kind.INDEXER, Kind.WINDOW, Kind.TAIL)
        self.directory = Directory(
            self.allocator,
            OURS,
            block_tokens=16,
            required_kinds=kind_bits(every),
            hash_block=hash_block,
        )


def by_number(previous, tokens):
    """Digests that say how many blocks there were and nothing else."""
    del tokens
    number = previous[0] + 1 if previous[1:] == bytes(31) else 1
    return bytes([number]) + bytes(31)


def test_b233_a_hit_is_verified_by_the_tokens_and_not_by_the_digest_alone():
    shelf = Colliding(by_number)
    ids, other = tokens(65, 1), tokens(65, 2)
    shelf.store(ids, snapshots=(64,))
    assert plan_on(shelf, ids).start == 64
    chain = shelf.chain(other)
    assert (chain.digests == shelf.chain(ids).digests).all()
    match = shelf.directory.find(chain)
    assert (match.entries.size, match.collisions) == (0, 4)
    found = plan_on(shelf, other, ideal=0)
    assert isinstance(found, Miss)


def test_b233_a_collision_inside_a_prompt_ends_the_hit_before_it():
    shelf = Colliding(by_number)
    ids = tokens(65, 1)
    shelf.store(ids)
    parted = joined(ids[:32], tokens(33, 2))
    assert plan_on(shelf, parted).shared == 32


def test_b234_after_a_collision_the_first_block_stays_and_the_second_is_freed():
    shelf = Colliding(by_number)
    ids, other = tokens(64, 1), tokens(64, 2)
    shelf.store(ids)
    shelf.store(other)
    assert shelf.allocator.available(Form.BLOCK) == 12
    assert len(shelf.directory.find(shelf.chain(ids)).entries) == 4
    shelf.allocator.evict(blocks=4)
    shelf.store(other)
    assert len(shelf.directory.find(shelf.chain(other)).entries) == 4
    assert shelf.directory.find(shelf.chain(ids)).entries.size == 0
    check(shelf.allocator)


def test_b234_a_runner_whose_digests_collide_computes_and_ends():
    runner = counting_runner(blocks=40)
    runner.directory._hash_block = by_number
    for seed in range(6):
        for _ in range(2):
            plan = request(runner, tokens(70, seed), policy=DENSE)
            assert (start_of(plan) > 0) == (seed == 0 and isinstance(plan, Plan))


BASE = {"weights": "w", "numerics": "n"}
CHANGES = {
    "weights": lambda: Identity.of_geometry(GEOMETRY, weights="v", numerics="n"),
    "numerics": lambda: Identity.of_geometry(GEOMETRY, weights="w", numerics="m"),
    "ratio": lambda: Identity.of_geometry(ratio_changed(), **BASE),
    "window": lambda: Identity.of_geometry(window_changed(), **BASE),
    "block": lambda: Identity.of_geometry(dataclasses.replace(GEOMETRY, cells_per_block=2), **BASE),
    "dtype": lambda: Identity.of_geometry(
        dataclasses.replace(GEOMETRY, row_format=formats.BFLOAT16), **BASE
    ),
    "adapter": lambda: dataclasses.replace(OURS, extra=(("adapter", "a"),)),
    "salt": lambda: dataclasses.replace(OURS, extra=(("salt", "a"),)),
    "image": lambda: dataclasses.replace(OURS, extra=(("image", "a"),)),
    "rank": lambda: dataclasses.replace(OURS, extra=(("rank", "1 of 2"),)),
}


def ratio_changed():
    layers = (*GEOMETRY.layers[:2], dataclasses.replace(GEOMETRY.layers[2], ratio=8))
    return dataclasses.replace(GEOMETRY, layers=(*layers, GEOMETRY.layers[3]))


def window_changed():
    first = dataclasses.replace(GEOMETRY.layers[0], window=9)
    return dataclasses.replace(GEOMETRY, layers=(first, *GEOMETRY.layers[1:]))


@pytest.mark.parametrize("part", CHANGES)
def test_changing_one_part_of_the_identity_is_a_miss(part):
    shelf, ids = Shelf(GEOMETRY), tokens(65, 1)
    shelf.store(ids, snapshots=(64,))
    theirs = CHANGES[part]()
    assert theirs.root("") != OURS.root("")
    options = PlanOptions(tile=16)
    found = plan_prefix(
        shelf.directory, shelf.chain(ids), GEOMETRY, options, identity=theirs, ideal=64
    )
    assert isinstance(found, Miss)
    assert sum(loss.tokens for loss in found.losses) == 64


def test_namespaces_of_the_same_prompt_never_meet(bench):
    ids, after = bench.ids(60), bench.ids(4)
    cold = bench.cold(ids, after)
    first, second = bench.namespace(), bench.namespace()
    bench.run(ids, after, first, policy=DENSE)
    runner = bench.runner
    entries = runner.directory.find(runner.chain(ids, namespace=first)).entries
    other = bench.run(ids, after, second)
    assert isinstance(other.plan, Miss)
    assert other.plan.ideal == 0
    assert not set(entries) & set(
        runner.directory.find(runner.chain(ids, namespace=second)).entries
    )
    assert other.continues(cold)


def test_a_chain_of_another_namespace_is_refused():
    """A tenant's name beside another tenant's chain must not read what that one stored."""
    runner = counting_runner(blocks=20)
    ids = tokens(64, 1)
    request(runner, ids, namespace="a")
    chain = runner.chain(ids, namespace="a")
    with pytest.raises(UserError):
        runner.start(ids, namespace="b", chain=chain)


def test_a_chain_of_other_tokens_is_refused():
    runner = counting_runner(blocks=20)
    with pytest.raises(UserError):
        runner.start(tokens(64, 1), chain=runner.chain(tokens(64, 2)))


def test_benches_do_not_share_namespaces(runner):
    assert Bench(runner, 0).namespace() != Bench(runner, 0).namespace()
