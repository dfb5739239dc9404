"""Which entries hold generated tokens, over withdrawals and new uses of their ids."""

import numpy as np
from bookkeeping import Books, ids

from hybridkv.engine.generated import GeneratedBlocks


def test_an_id_that_was_withdrawn_and_taken_again_is_exact():
    """Damage on a tier withdraws entries without evicting them."""
    books = Books(blocks=2)
    generated = GeneratedBlocks(books, 16)
    (entry,) = books.chain(1)
    generated.mark_inexact(ids(entry))
    generated.published(ids(entry))
    assert not generated.exact(ids(entry))
    books.detach(ids(entry))
    again = books.chain(2)
    assert entry in again
    assert generated.exact(np.asarray(again))
    assert generated.exact_each(np.asarray(again)).all()
    generated.found(np.asarray(again))
    assert generated.use.used == 0


def test_only_what_was_marked_is_inexact_and_only_while_it_is_published():
    books = Books(blocks=3)
    generated = GeneratedBlocks(books, 16)
    chain = books.chain(3)
    generated.mark_inexact(ids(chain[2]))
    assert generated.exact_each(np.asarray(chain)).tolist() == [True, True, False]
    generated.published(ids(chain[2]))
    books.evict(blocks=1)
    assert generated.use.wasted == 16
    assert generated.exact(np.asarray(chain))
