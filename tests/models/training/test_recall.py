import re

import numpy as np
import pytest

from models.training.batches import BatchOptions, make_batch
from models.training.recall import RecallTask, plant

LENGTH = 400


@pytest.fixture
def sequence(text):
    return plant(text, LENGTH, RecallTask(facts=5, queries=8), np.random.default_rng(0))


def test_a_sequence_has_its_length_and_all_pieces(sequence):
    assert sequence.tokens.shape == (LENGTH,)
    assert len(re.findall(rb"\{[A-Z][0-9]\}", sequence.tokens.tobytes())) == 5 + 8


def test_every_answer_was_told_before_at_its_distance(sequence):
    tokens = sequence.tokens
    assert len(sequence.answers) == 8
    for answer, distance in zip(sequence.answers, sequence.distances, strict=True):
        told = answer - distance
        assert tokens[answer] == tokens[told]
        assert tokens[answer - 1] == tokens[told - 1]
        key = bytes(tokens[answer - 2 : answer])
        assert key not in tokens[told + 1 : answer - 2].tobytes()


def test_a_key_has_one_value(sequence):
    pieces = set(re.findall(rb"\{([A-Z])([0-9])\}", sequence.tokens.tobytes()))
    assert len(pieces) == len({key for key, _ in pieces}) == 5


def test_what_nobody_can_know_is_marked(sequence):
    known = set(sequence.answers.tolist())
    unknown = set(sequence.random.tolist())
    assert not known & unknown
    digits = {
        match.start() + 2 for match in re.finditer(rb"\{[A-Z][0-9]\}", sequence.tokens.tobytes())
    }
    assert digits - known == digits & unknown
    assert len(digits & unknown) == 5


def test_the_play_is_left_in_order(text, sequence):
    rest = re.sub(rb"\{[A-Z][0-9]\}", b"", sequence.tokens.tobytes())
    assert rest == text[: len(rest)].tobytes()


def test_the_number_of_facts_can_vary(text):
    task = RecallTask(facts=6, fewest=1, queries=2)
    generator = np.random.default_rng(0)
    told = {len(plant(text, LENGTH, task, generator).random) - 6 - 2 for _ in range(40)}
    assert told <= {n + n - 6 for n in range(1, 7)}
    assert len(told) == 6


def test_text_without_room_is_refused(text):
    with pytest.raises(ValueError, match="pieces"):
        plant(text, 150, RecallTask(facts=12, queries=24), np.random.default_rng(0))


def test_a_batch_depends_on_its_step_alone(text):
    options = BatchOptions(size=3, length=300, task=RecallTask(facts=4, queries=4))
    first, again, other = (make_batch(text, step, options) for step in (5, 5, 6))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert (first.tokens != other.tokens).any()


def test_sequences_with_the_task_have_their_share(text):
    options = BatchOptions(
        size=2, length=300, recall_share=0.3, task=RecallTask(facts=4, queries=4)
    )
    carriers = sum(make_batch(text, step, options).answers.any(1).sum() for step in range(50))
    assert carriers == 30


def test_answers_count_more_and_the_unknowable_nothing(text):
    task = RecallTask(facts=4, queries=9)
    options = BatchOptions(size=1, length=300, recall_share=1.0, task=task)
    batch = make_batch(text, 0, options)
    assert (batch.weights[batch.answers] == options.answer_weight).all()
    assert (batch.weights == 0).sum() == 4 + 4 + 9  # first digits, key letters
