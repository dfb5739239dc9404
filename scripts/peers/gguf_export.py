"""Writes a Hugging Face folder (``config.json`` and float32 safetensors) as a GGUF file.

    python scripts/peers/gguf_export.py FOLDER OUT.gguf

Two architectures: ``deepseek_v4`` (llama.cpp's ``deepseek4``, which the gguf package does not know:
its keys and names are spelled here) and ``llama``. The vocabulary is a dummy of the right size,
because prompts are token ids. ``metadata`` and ``tensors`` are pure and need only the config.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Fields = Mapping[str, Any]
RATIOS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
HASHED = "hash_moe"
SQRT_SOFTPLUS = 4
"""llama.cpp's number for scores of ``sqrt(softplus(x))``."""


class ExportError(ValueError):
    """The folder cannot be written as GGUF; the message says why in one line."""


class Source(NamedTuple):
    """Where a GGUF tensor comes from."""

    name: str
    """Name in the safetensors file."""
    part: str = "whole"
    """``whole``, ``first`` or ``second`` (half of the last axis but one), ``integer`` (a table),
    or ``pairs`` (rotary pairs lie half a head apart and must become neighbours)."""
    heads: int = 0
    """Heads of a ``pairs`` tensor."""


def compress_ratios(config: Fields) -> list[int]:
    """Tokens a compressed row stands for, per layer; llama.cpp knows 0, 4 and 128."""
    layers = config["num_hidden_layers"]
    if config.get("layer_types"):
        rates = RATIOS | dict(config.get("compress_rates") or {})
        unknown = sorted(set(config["layer_types"]) - set(rates))
        if unknown:
            raise ExportError(f"layer_types has {unknown[0]!r}: known are {', '.join(RATIOS)}")
        ratios = [rates[kind] for kind in config["layer_types"]]
    else:
        ratios = list(config["compress_ratios"])[:layers]
    strange = sorted(set(ratios) - set(RATIOS.values()))
    if strange:
        raise ExportError(f"a layer compresses by {strange[0]}: llama.cpp reads only 0, 4 and 128")
    if len(ratios) != layers:
        raise ExportError(f"{len(ratios)} layer types for num_hidden_layers = {layers}")
    return ratios


def hash_layers(config: Fields) -> int:
    """How many layers, counted from the first, pick experts by token id."""
    kinds = config.get("mlp_layer_types")
    if not kinds:
        return min(config["num_hash_layers"], config["num_hidden_layers"])
    hashed = [kind == HASHED for kind in kinds]
    if hashed != sorted(hashed, reverse=True):
        raise ExportError(f"{HASHED} layers must come first: llama.cpp stores only their number")
    return sum(hashed)


def metadata(config: Fields) -> dict[str, Any]:
    """Every GGUF key of the model, and the dummy vocabulary."""
    kind = _known_type(config)
    try:
        keys = _llama_keys(config) if kind == "llama" else _deepseek4_keys(config)
        tokens = config["vocab_size"]
    except KeyError as error:
        raise ExportError(f"config.json lacks {error.args[0]!r}") from error
    # This kind of tokenizer has no special tokens unless they are named: no id ends a sequence.
    vocabulary = {
        "tokenizer.ggml.model": "rwkv",
        "tokenizer.ggml.tokens": [f"t{i} " for i in range(tokens)],
        "tokenizer.ggml.token_type": [1] * tokens,
    }
    return keys | vocabulary


def tensors(config: Fields) -> dict[str, Source]:
    """GGUF tensor names and where each comes from."""
    kind = _known_type(config)
    try:
        return _llama_tensors(config) if kind == "llama" else _deepseek4_tensors(config)
    except KeyError as error:
        raise ExportError(f"config.json lacks {error.args[0]!r}") from error


def convert(value: np.ndarray, source: Source) -> np.ndarray:
    """One tensor as GGUF has it."""
    if source.part == "integer":
        return np.ascontiguousarray(value, np.int32)
    if source.part in ("first", "second"):
        half = value.shape[-2] // 2
        value = value[..., :half, :] if source.part == "first" else value[..., half:, :]
    if source.part == "pairs":
        shape = value.shape
        value = value.reshape(source.heads, 2, -1, shape[-1]).swapaxes(1, 2).reshape(shape)
    return np.ascontiguousarray(value, np.float32)


def export(folder: str | pathlib.Path, out: str | pathlib.Path) -> None:
    """Reads ``folder`` and writes ``out``.

    Raises:
      ExportError: the folder lacks a file or a tensor, or describes a model llama.cpp does not run.
    """
    import gguf  # here, because the mapping above is used without it
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    folder = pathlib.Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
        values = load_file(str(folder / "model.safetensors"))
    except (OSError, ValueError, SafetensorError) as error:
        raise ExportError(f"cannot read {folder}: {error}") from error
    writer = gguf.GGUFWriter(str(out), architecture(config))
    for key, value in metadata(config).items():
        _add_key(writer, key, value)
    for name, source in tensors(config).items():
        if source.name not in values:
            raise ExportError(f"{folder}/model.safetensors lacks {source.name}")
        writer.add_tensor(name, convert(values[source.name], source))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def architecture(config: Fields) -> str:
    """llama.cpp's name of the architecture."""
    return {"llama": "llama", "deepseek_v4": "deepseek4"}[_known_type(config)]


def _known_type(config: Fields) -> str:
    kind = config.get("model_type")
    if kind not in ("llama", "deepseek_v4"):
        raise ExportError(f"model_type is {kind!r}: this exporter reads deepseek_v4 and llama")
    return kind


def _add_key(writer: Any, key: str, value: Any) -> None:
    """Writes a key by its Python type: llama.cpp reads counts as uint32 and reals as float32."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _common_keys(config: Fields, head_dim: int, rope_dim: int, theta: float) -> dict[str, Any]:
    """What both architectures have, without the architecture's name in front."""
    return {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": rope_dim,
        "rope.freq_base": float(theta),
    }


def _llama_keys(config: Fields) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ExportError("rope_scaling is set: only plain rotary positions are exported for llama")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    theta = rope.get("rope_theta") or config.get("rope_theta", 10000.0)
    keys = _common_keys(config, head_dim, head_dim, theta) | {
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "feed_forward_length": config["intermediate_size"],
    }
    return {f"llama.{key}": value for key, value in keys.items()}


def _check_sizes(config: Fields) -> None:
    """Refuses sizes at which llama.cpp would abort instead of saying so."""
    streams, width = config["hc_mult"], config["index_head_dim"]
    if streams != 4:
        raise ExportError(f"hc_mult is {streams}: llama.cpp runs only 4 streams")
    if width % 64 or width == config["head_dim"]:
        raise ExportError(
            f"index_head_dim is {width}: llama.cpp needs a multiple of 64 other than head_dim"
        )
    if RATIOS["compressed_sparse_attention"] not in compress_ratios(config):
        raise ExportError("no layer compresses by 4: llama.cpp does not run such a model")


def _deepseek4_keys(config: Fields) -> dict[str, Any]:
    if config.get("scoring_func", "sqrtsoftplus") != "sqrtsoftplus":
        raise ExportError(f"scoring_func is {config['scoring_func']!r}: only sqrtsoftplus is known")
    _check_sizes(config)
    rope = config.get("rope_parameters") or {}
    theta = rope.get("main", {}).get("rope_theta") or config["rope_theta"]
    yarn = rope.get("compress") or config.get("rope_scaling") or {}
    keys = _common_keys(config, config["head_dim"], config["qk_rope_head_dim"], theta) | {
        "feed_forward_length": config["moe_intermediate_size"],
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.sliding_window": config["sliding_window"],
        "attention.output_group_count": config["o_groups"],
        "attention.output_lora_rank": config["o_lora_rank"],
        "attention.compress_ratios": compress_ratios(config),
        "attention.compress_rope_freq_base": float(
            yarn.get("rope_theta") or config["compress_rope_theta"]
        ),
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config.get("norm_topk_prob", True)),
        "expert_gating_func": SQRT_SOFTPLUS,
        "swiglu_clamp_exp": [float(config["swiglu_limit"])] * config["num_hidden_layers"],
        "swiglu_clamp_shexp": [float(config["swiglu_limit"])] * config["num_hidden_layers"],
        "hash_layer_count": hash_layers(config),
        "hyper_connection.count": config["hc_mult"],
        "hyper_connection.sinkhorn_iterations": config["hc_sinkhorn_iters"],
        "hyper_connection.epsilon": float(config["hc_eps"]),
    }
    if float(yarn.get("factor", 1.0)) != 1.0:
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(yarn["factor"]),
            "rope.scaling.original_context_length": yarn["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": float(yarn.get("beta_fast", 32)),
            "rope.scaling.yarn_beta_slow": float(yarn.get("beta_slow", 1)),
        }
    return {f"deepseek4.{key}": value for key, value in keys.items()}


def _llama_tensors(config: Fields) -> dict[str, Source]:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    names = {
        "token_embd.weight": Source("model.embed_tokens.weight"),
        "output_norm.weight": Source("model.norm.weight"),
    }
    if not config.get("tie_word_embeddings"):
        names["output.weight"] = Source("lm_head.weight")
    for layer in range(config["num_hidden_layers"]):
        to, of = f"blk.{layer}", f"model.layers.{layer}"
        names |= {
            f"{to}.attn_norm.weight": Source(f"{of}.input_layernorm.weight"),
            f"{to}.ffn_norm.weight": Source(f"{of}.post_attention_layernorm.weight"),
            f"{to}.attn_q.weight": Source(f"{of}.self_attn.q_proj.weight", "pairs", heads),
            f"{to}.attn_k.weight": Source(f"{of}.self_attn.k_proj.weight", "pairs", kv_heads),
            f"{to}.attn_v.weight": Source(f"{of}.self_attn.v_proj.weight"),
            f"{to}.attn_output.weight": Source(f"{of}.self_attn.o_proj.weight"),
            f"{to}.ffn_gate.weight": Source(f"{of}.mlp.gate_proj.weight"),
            f"{to}.ffn_up.weight": Source(f"{of}.mlp.up_proj.weight"),
            f"{to}.ffn_down.weight": Source(f"{of}.mlp.down_proj.weight"),
        }
    return names


def _deepseek4_tensors(config: Fields) -> dict[str, Source]:
    names = {
        "token_embd.weight": Source("model.embed_tokens.weight"),
        "output_norm.weight": Source("model.norm.weight"),
        "output.weight": Source("lm_head.weight"),
    }
    for leaf in ("fn", "base", "scale"):
        names[f"output_hc_{leaf}.weight"] = Source(f"model.hc_head.hc_{leaf}")
    hashed = hash_layers(config)
    for layer, ratio in enumerate(compress_ratios(config)):
        to, of = f"blk.{layer}", f"model.layers.{layer}"
        for block in ("attn", "ffn"):
            for leaf in ("fn", "base", "scale"):
                names[f"{to}.hc_{block}_{leaf}.weight"] = Source(f"{of}.{block}_hc.{leaf}")
        names |= _attention_tensors(to, of) | _expert_tensors(to, of, layer < hashed)
        if ratio:
            names |= _compressor_tensors(f"{to}.attn", f"{of}.self_attn.compressor")
        if ratio == RATIOS["compressed_sparse_attention"]:
            indexer = f"{of}.self_attn.compressor.indexer"
            names |= _compressor_tensors(f"{to}.indexer", indexer)
            names[f"{to}.indexer.attn_q_b.weight"] = Source(f"{indexer}.q_b_proj.weight")
            names[f"{to}.indexer.proj.weight"] = Source(f"{indexer}.scorer.weights_proj.weight")
    return names


def _attention_tensors(to: str, of: str) -> dict[str, Source]:
    attention = f"{of}.self_attn"
    return {
        f"{to}.attn_norm.weight": Source(f"{of}.input_layernorm.weight"),
        f"{to}.ffn_norm.weight": Source(f"{of}.post_attention_layernorm.weight"),
        f"{to}.attn_sinks.weight": Source(f"{attention}.sinks"),
        f"{to}.attn_q_a.weight": Source(f"{attention}.q_a_proj.weight"),
        f"{to}.attn_q_a_norm.weight": Source(f"{attention}.q_a_norm.weight"),
        f"{to}.attn_q_b.weight": Source(f"{attention}.q_b_proj.weight"),
        f"{to}.attn_kv.weight": Source(f"{attention}.kv_proj.weight"),
        f"{to}.attn_kv_a_norm.weight": Source(f"{attention}.kv_norm.weight"),
        f"{to}.attn_output_a.weight": Source(f"{attention}.o_a_proj.weight"),
        f"{to}.attn_output_b.weight": Source(f"{attention}.o_b_proj.weight"),
    }


def _compressor_tensors(to: str, of: str) -> dict[str, Source]:
    return {
        f"{to}_compressor_kv.weight": Source(f"{of}.kv_proj.weight"),
        f"{to}_compressor_gate.weight": Source(f"{of}.gate_proj.weight"),
        f"{to}_compressor_ape.weight": Source(f"{of}.position_bias"),
        f"{to}_compressor_norm.weight": Source(f"{of}.kv_norm.weight"),
    }


def _expert_tensors(to: str, of: str, hashed: bool) -> dict[str, Source]:
    experts, shared = f"{of}.mlp.experts", f"{of}.mlp.shared_experts"
    names = {
        f"{to}.ffn_gate_inp.weight": Source(f"{of}.mlp.gate.weight"),
        f"{to}.ffn_gate_exps.weight": Source(f"{experts}.gate_up_proj", "first"),
        f"{to}.ffn_up_exps.weight": Source(f"{experts}.gate_up_proj", "second"),
        f"{to}.ffn_down_exps.weight": Source(f"{experts}.down_proj"),
        f"{to}.ffn_gate_shexp.weight": Source(f"{shared}.gate_proj.weight"),
        f"{to}.ffn_up_shexp.weight": Source(f"{shared}.up_proj.weight"),
        f"{to}.ffn_down_shexp.weight": Source(f"{shared}.down_proj.weight"),
    }
    if hashed:
        names[f"{to}.ffn_gate_tid2eid.weight"] = Source(f"{of}.mlp.gate.tid2eid", "integer")
    else:
        names[f"{to}.exp_probs_b.bias"] = Source(f"{of}.mlp.gate.e_score_correction_bias")
    return names


def main() -> int:
    """Exports one folder; bad input is one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="config.json and model.safetensors")
    parser.add_argument("out", help="the GGUF file to write")
    args = parser.parse_args()
    try:
        export(args.folder, args.out)
    except (ExportError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
