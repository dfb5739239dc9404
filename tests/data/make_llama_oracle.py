"""Makes an oracle folder with transformers: a seeded random Llama and the logits it computes.

    python tests/data/make_llama_oracle.py tests/data/oracle/llama_tiny

Needs the ``peers`` extra. Every parameter is random, so that no term of the model is degenerate.
"""

import argparse
import pathlib

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build(seed: int) -> LlamaForCausalLM:
    """The model, in float32."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,  # not hidden_size / heads
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        rms_norm_eps=1e-5,
        dtype="float32",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        if value.dim() < 2:
            value.copy_(1 + 0.2 * noise)
        elif "embed" in name:
            value.copy_(noise)
        else:
            value.copy_((2.0 if "lm_head" in name else 1.0) * noise * value.shape[-1] ** -0.5)
    return model


def main() -> None:
    """Writes config, weights and arrays."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--prompt", type=int, default=41)
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.manual_seed(args.seed)
    model = build(args.seed)
    generator = torch.Generator().manual_seed(args.seed + 1)
    ids = torch.randint(0, 64, (1, args.prompt), generator=generator)
    for _ in range(args.new):  # recomputed each time: no cache takes part in the oracle
        token = model(ids, use_cache=False).logits[0, -1].argmax()
        ids = torch.cat([ids, token.reshape(1, 1)], dim=1)
    args.folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.folder)
    np.savez_compressed(
        args.folder / "oracle.npz",
        input_ids=ids[:, : args.prompt].numpy().astype(np.int32),
        greedy_tokens=ids[0, args.prompt :].numpy().astype(np.int32),
        full_ids=ids.numpy().astype(np.int32),
        logits=model(ids, use_cache=False).logits[0].numpy(),
    )
    (args.folder / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
