import numpy as np
import pytest

from models.deepseek_v4.parallel import ParallelOptions
from models.training import preset
from models.training.batches import BatchOptions
from models.training.recall import RecallTask
from models.training.run import RunOptions
from models.training.schedule import Schedule
from models.training.step import StepOptions


@pytest.fixture
def fields():
    """Two layers, one routed, with every width small."""
    small = preset.shakespeare_fields()
    small.update(
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=small["layer_types"][:2],
        mlp_layer_types=small["mlp_layer_types"][:2],
        num_attention_heads=2,
        head_dim=16,
        qk_rope_head_dim=4,
        q_lora_rank=16,
        o_lora_rank=8,
        sliding_window=8,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=4,
        moe_intermediate_size=16,
        hc_sinkhorn_iters=2,
    )
    return small


@pytest.fixture
def text():
    """Enough bytes with blanks to plant facts in, and little to learn."""
    return np.frombuffer(b"to be or not to be, that is the question. " * 50, np.uint8)


@pytest.fixture
def options():
    task = RecallTask(facts=2, queries=3)
    forward = ParallelOptions(indexer_loss=True, indexer_stride=2, dense_experts=True)
    return RunOptions(
        batch=BatchOptions(size=2, length=64, recall_share=0.5, task=task),
        schedule=Schedule(warmup_steps=1, dense=0.0),
        step=StepOptions(forward=forward),
    )
