"""Makes an oracle folder with transformers: a seeded random model and the logits it computes.

    python tests/data/make_oracle.py tests/data/oracle/tiny_d --ratios 2,6 --window 12

Needs the ``peers`` extra. Every parameter is random, so that no term of the model is degenerate.
"""

import argparse
import pathlib

import numpy as np
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

SLIDING, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)


def build(args: argparse.Namespace) -> DeepseekV4ForCausalLM:
    """The model, in float32."""
    sparse, heavy = (int(x) for x in args.ratios.split(","))
    kinds = [SLIDING, SPARSE, HEAVY, SPARSE]
    share = 0.5
    config = DeepseekV4Config(
        vocab_size=128,
        hidden_size=48,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        compress_rates={SPARSE: sparse, HEAVY: heavy},
        mlp_layer_types=["hash_moe"] + ["moe"] * (len(kinds) - 1),
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        qk_rope_head_dim=8,
        partial_rotary_factor=share,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=12,
        sliding_window=args.window,
        index_n_heads=32,
        index_head_dim=16,
        index_topk=args.topk,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=24,
        hc_mult=3,
        hc_sinkhorn_iters=7,
        routed_scaling_factor=2.5,
        rope_theta=10000.0,
        compress_rope_theta=40000.0,
        dtype="float32",
        eos_token_id=None,
        pad_token_id=None,
    )
    model = DeepseekV4ForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(args.seed)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("tid2eid"):
                value.copy_(torch.randint(0, 6, value.shape, generator=generator))
            elif value.dtype == torch.float32 and "inv_freq" not in name:
                value.copy_(_random(name, value, generator))
    return model


def _random(name: str, value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(value.shape, generator=generator)
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.2 * noise
    if value.dim() < 2 or "position_bias" in name:
        return 0.5 * noise
    if "embed" in name:
        return noise
    scale = 2.0 if "lm_head" in name else 1.0
    return scale * noise * value.shape[-1] ** -0.5


def main() -> None:
    """Writes config, weights and arrays."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--ratios", default="2,6", help="sparse,heavy")
    parser.add_argument("--window", type=int, default=12)
    parser.add_argument("--topk", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=53)
    parser.add_argument("--new", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.manual_seed(args.seed)
    model = build(args)
    generator = torch.Generator().manual_seed(args.seed + 1)
    prompt = torch.randint(0, 128, (1, args.prompt), generator=generator)
    prefill = model(prompt).logits[0]
    ids, greedy, rows = prompt, [], []
    logits = prefill
    for _ in range(args.new):  # recomputed each time: no cache takes part in the oracle
        token = logits[-1].argmax()
        greedy.append(int(token))
        ids = torch.cat([ids, token.reshape(1, 1)], dim=1)
        logits = model(ids).logits[0]
        rows.append(logits[-1])
    args.folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.folder)
    np.savez_compressed(
        args.folder / "oracle.npz",
        input_ids=prompt.numpy().astype(np.int32),
        prefill_logits=prefill.numpy(),
        greedy_tokens=np.asarray(greedy, np.int32),
        decode_logits=torch.stack(rows).numpy(),
        full_ids=ids.numpy().astype(np.int32),
        full_logits=logits.numpy(),
    )
    (args.folder / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
