import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.errors import UserError
from hybridkv.prefixes.ledger import Ledger

sequences = st.lists(st.integers(0, 2), max_size=9)


def shared(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@given(st.lists(sequences, max_size=12), st.lists(sequences, min_size=1, max_size=6))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_longest_is_that_of_brute_force(added, asked):
    ledger = Ledger()
    for tokens in added:
        ledger.add("", tokens)
    for tokens in asked:
        assert ledger.longest("", tokens) == max((shared(x, tokens) for x in added), default=0)
    prefixes = {tuple(x[:n]) for x in added for n in range(1, len(x) + 1)}
    assert ledger.tokens == len(prefixes)


def test_a_prefix_ends_anywhere():
    ledger = Ledger()
    ledger.add("", [7, 7, 2, 5, 5])
    ledger.add("", [7, 7, 2, 9])
    for tokens, expected in (
        ([7, 7, 2, 5, 5, 1], 5),
        ([7, 7, 2, 9, 5], 4),
        ([7, 7, 2, 3], 3),
        ([7, 7], 2),
        ([7, 8], 1),
        ([8], 0),
        ([], 0),
    ):
        assert ledger.longest("", tokens) == expected
    assert ledger.tokens == 6


def test_namespaces_share_nothing():
    ledger = Ledger()
    ledger.add("a", [1, 2, 3])
    assert ledger.longest("a", [1, 2, 3]) == 3
    assert ledger.longest("b", [1, 2, 3]) == ledger.longest("", [1, 2, 3]) == 0


def test_later_changes_of_an_added_array_are_not_seen():
    ledger, tokens = Ledger(), np.arange(10, dtype=np.uint32)
    ledger.add("", tokens)
    tokens[:] = 0
    assert ledger.longest("", np.arange(10)) == 10


def test_long_sequences_that_share_a_prompt_cost_it_once():
    ledger, rng = Ledger(), np.random.default_rng(0)
    prompt = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    for turn in range(20):
        ledger.add("", np.concatenate([prompt, np.array([turn, 1, 2], np.uint32)]))
    assert ledger.tokens == prompt.size + 20 * 3
    assert ledger.longest("", prompt) == prompt.size
    assert ledger.longest("", np.concatenate([prompt, prompt[:1] * 0 + 99])) == prompt.size


def test_what_are_no_tokens_is_refused():
    with pytest.raises(UserError, match="tokens are float64"):
        Ledger().add("", [0.5])
    with pytest.raises(UserError, match="token -1"):
        Ledger().longest("", [-1])
