import dataclasses

import jax
import numpy as np
import pytest

from models.training.checkpoints import CheckpointError, Checkpoints
from models.training.run import Limits, Run


def _leaves(run):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(run.state)]


def test_training_lowers_the_loss_and_moves_the_biases(fields, text, options):
    run = Run(fields, text, options)
    start = [np.asarray(b) for b in jax.tree.leaves(run.state.biases)]
    run.train(Limits(steps=12, record_steps=2))
    first, last = run.progress.curve[0], run.progress.curve[-1]
    assert last["loss"] < first["loss"]
    moved = [np.asarray(b) for b in jax.tree.leaves(run.state.biases)]
    assert all((a != b).any() for a, b in zip(start, moved, strict=True))
    assert all(np.isfinite(leaf).all() for leaf in _leaves(run))


def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(fields, text, options, tmp_path):
    limits = Limits(steps=4, record_steps=1)
    whole = Run(fields, text, options)
    checkpoints = Checkpoints(tmp_path, whole.identity)
    whole.train(dataclasses.replace(limits, stop_after=2), checkpoints)
    checkpoints.close()
    whole.train(limits)

    resumed = Run(fields, text, options)
    checkpoints = Checkpoints(tmp_path, resumed.identity)
    resumed.resume(checkpoints)
    assert resumed.progress.step == 2
    resumed.train(limits)
    checkpoints.close()
    assert [record["step"] for record in resumed.progress.curve] == [1, 2, 3, 4]
    for ours, theirs in zip(_leaves(resumed), _leaves(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_another_models_checkpoint_is_refused(fields, text, options, tmp_path):
    run = Run(fields, text, options)
    checkpoints = Checkpoints(tmp_path, run.identity)
    with pytest.raises(CheckpointError, match="start without --resume"):
        run.resume(checkpoints)
    checkpoints.save(run.state, run.progress)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, run.identity)
    with pytest.raises(CheckpointError, match="already holds a run"):
        checkpoints.start()
    checkpoints.close()
    other = Run({**fields, "index_topk": 8}, text, options)
    checkpoints = Checkpoints(tmp_path, other.identity)
    with pytest.raises(CheckpointError, match="another model"):
        other.resume(checkpoints)
    checkpoints.close()


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write to"):
        Checkpoints(tmp_path / "file", {})
