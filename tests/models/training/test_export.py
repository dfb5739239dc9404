import jax
import numpy as np
import pytest
from flax import nnx

from models.deepseek_v4.config import load_config
from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.weights import load_safetensors
from models.training import evaluate
from models.training.export import ExportError, export_curve, export_model
from models.training.run import Run


def test_an_exported_model_loads_bit_for_bit(fields, text, options, tmp_path):
    model = Run(fields, text, options).model
    export_model(model, fields, tmp_path)
    loaded = DeepseekV4(load_config(tmp_path), nnx.Rngs(7))
    load_safetensors(loaded, tmp_path)
    assert loaded.config == model.config
    ours, theirs = (jax.tree.leaves(nnx.state(m)) for m in (model, loaded))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_an_unwritable_folder_is_one_clear_line(fields, text, options, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match="cannot write to"):
        export_model(Run(fields, text, options).model, fields, tmp_path / "file")


def test_the_curve_is_a_picture_and_its_numbers(tmp_path):
    pytest.importorskip("matplotlib")
    curve = [
        {"bytes": 10.0 * n, "loss": 3.0 - n, "sparse": float(n > 0), "answer_accuracy": 0.1}
        for n in range(2)
    ]
    export_curve(curve, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "curve.json").is_file()


def test_an_untrained_model_knows_nothing(fields, text, options):
    model = Run(fields, text, options).model
    settings = evaluate.EvaluationOptions(
        length=128, batch=2, sequences=3, recall_sequences=3, task=options.batch.task
    )
    assert evaluate.bits_per_byte(model, text, settings) > 6
    cells = evaluate.recall_by_distance(model, text, settings)
    assert sum(cell.asked for cell in cells) == 3 * options.batch.task.queries
    ablated = evaluate.without_compressed_rows(evaluate.without_indexer(model))
    assert evaluate.bits_per_byte(ablated, text, settings) > 6
