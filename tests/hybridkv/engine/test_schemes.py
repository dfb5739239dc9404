"""Several engines side by side: each request runs on the one that is chosen for it."""

import numpy as np
import pytest
from scenarios.runs import GEOMETRY, CountingModel, tokens

from hybridkv.engine.engine import Engine, EngineOptions
from hybridkv.engine.requests import Request
from hybridkv.engine.runner import RunnerOptions
from hybridkv.engine.schemes import Schemes, hybrid_above
from hybridkv.errors import UserError
from hybridkv.prefixes.identity import Identity
from hybridkv.state.batch import StepOptions
from hybridkv.state.capacity import Capacity


def counting_engine(*, reuse: bool = True) -> Engine:
    capacity = Capacity(blocks=40, slots=2, blocks_per_sequence=10)
    sizes = RunnerOptions(capacity=capacity, snapshots=8, reuse=reuse)
    identity = Identity.of_geometry(GEOMETRY, weights="none", numerics="none")
    options = EngineOptions(probe=False)
    return Engine(CountingModel(), StepOptions(tile=16), sizes, options, identity=identity)


@pytest.fixture(scope="module")
def engines():
    return {"hybrid": counting_engine(), "generic": counting_engine(reuse=False)}


def request(length: int, seed: int = 0) -> Request:
    return Request(prompt=tokens(length, seed), max_new_tokens=3)


def test_each_request_runs_where_it_belongs(engines):
    before = {name: engine.counters.submitted for name, engine in engines.items()}
    schemes = Schemes(engines, hybrid_above(40))
    outputs = schemes.run([request(40), request(41), request(8), request(100)])
    assert [output.prompt_tokens for output in outputs] == [40, 41, 8, 100]
    assert all(len(output.tokens) == 3 for output in outputs)
    taken = {name: engine.counters.submitted - before[name] for name, engine in engines.items()}
    assert taken == {"hybrid": 2, "generic": 2}


def test_nothing_is_found_where_reuse_is_off(engines):
    schemes = Schemes(engines, hybrid_above(40))
    for length, reused in ((64, 48), (32, 0)):
        schemes.run([request(length, 1)])
        (again,) = schemes.run([request(length, 1)])
        assert again.reused == reused


def test_waiting_for_one_request_moves_the_others_on(engines):
    schemes = Schemes(engines, hybrid_above(40))
    short, long = schemes.submit(request(8)), schemes.submit(request(100, 3))
    while not short.done or not long.done:
        assert list(long) == long.output.tokens
        short.result()
    assert len(short.output.tokens) == len(long.output.tokens) == 3
    assert not any(engine.waiting for engine in engines.values())


def test_a_request_that_is_refused_leaves_none_of_its_batch(engines):
    schemes = Schemes(engines, hybrid_above(40))
    with pytest.raises(UserError, match="capacity"):
        schemes.run([request(8), request(60), request(1000)])
    assert not any(engine.waiting for engine in engines.values())


def test_a_scheme_that_does_not_exist_is_refused_by_name(engines):
    with pytest.raises(UserError, match=r"no scheme 'dense': choose one of hybrid, generic"):
        Schemes(engines, lambda _: "dense").submit(request(8))


def test_a_choice_by_length_needs_token_ids():
    with pytest.raises(UserError, match="token ids"):
        hybrid_above(4)(Request(prompt="some text"))


def test_a_refusal_does_not_depend_on_the_kind_of_integers(engines):
    schemes = Schemes(engines, hybrid_above(2))
    (listed,) = schemes.run([Request(prompt=[1, 2, 3], max_new_tokens=2)])
    (array,) = schemes.run([Request(prompt=np.array([1, 2, 3], np.int64), max_new_tokens=2)])
    assert listed.tokens == array.tokens
