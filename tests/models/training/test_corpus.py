import numpy as np
import pytest

from models.training import corpus


def test_held_out_plays_are_never_trained_on():
    trained = corpus.training_bytes().tobytes()
    held_out = corpus.held_out_bytes().tobytes()
    assert trained.count(b"# The Tempest") == 0
    for start in range(0, len(held_out) - 200, len(held_out) // 50):
        assert held_out[start : start + 200] not in trained


def test_all_plays_are_either_trained_on_or_held_out():
    everything = sum(len(text) for text in corpus.plays().values())
    assert len(corpus.training_bytes()) + len(corpus.held_out_bytes()) == everything
    assert corpus.training_bytes().dtype == np.uint8


def test_no_line_ends_in_a_space():
    assert all(b" \n" not in text for text in corpus.plays().values())


def test_a_missing_package_is_one_clear_line(monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(corpus.importlib.resources, "files", absent)
    with pytest.raises(corpus.CorpusError, match=r"^[^\n]*pip install[^\n]*$"):
        corpus.plays()
