"""Decodes text with a DeepSeek-V4 checkpoint, on whatever device JAX finds.

python scripts/decode.py "ROMEO"
python scripts/decode.py --file data/scene.txt --max-new-tokens 400 --temperature 0.8
"""

import argparse
import dataclasses
import pathlib
import sys
import time

import command_line
import numpy as np

from hybridkv import formats
from hybridkv.engine.generate import GenerationStats, Generator, check_prompt, default_options
from hybridkv.engine.sampling import SamplingOptions
from hybridkv.errors import UserError
from models.deepseek_v4.checkpoint import load_model
from models.deepseek_v4.runtime import DeepseekV4Runtime
from models.text import Text, load_text

FORMATS = {x.name: x for x in (formats.FLOAT32, formats.BFLOAT16)}


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompt", nargs="?", help="prompt text; - reads standard input")
    parser.add_argument("--file", type=pathlib.Path, help="file with the prompt's text")
    parser.add_argument("--token-ids", help="prompt as comma-separated token ids; ids come out")
    parser.add_argument(
        "--checkpoint",
        type=pathlib.Path,
        default=command_line.DEFAULT_CHECKPOINT,
        help="folder with config.json and safetensors or Orbax parameters (default: the model "
        "that the repository ships)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--context", type=int, default=4096, help="tokens the cache holds")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, help="0: all tokens")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tile", type=int, help="prompt tokens computed at once")
    parser.add_argument("--cache-format", choices=sorted(FORMATS), help="how rows are stored")
    parser.add_argument("--echo", action="store_true", help="print the prompt first")
    parser.add_argument("--stats-json", metavar="FILE", help="write the statistics here too")
    return parser.parse_args(argv)


def read_prompt(args: argparse.Namespace, text: Text | None) -> np.ndarray:
    """The prompt's token ids.

    Raises:
      UserError: no prompt or several, or one that cannot be read.
    """
    given = [x for x in (args.prompt, args.file, args.token_ids) if x is not None]
    if len(given) != 1:
        raise UserError("give one prompt: as text, with --file or with --token-ids")
    if args.token_ids is not None:
        try:
            return np.asarray([int(x) for x in args.token_ids.split(",") if x.strip()], np.int64)
        except ValueError as error:
            raise UserError(f"--token-ids takes integers, as in 5,17,3: {error}") from error
    assert text is not None
    if args.file is not None:
        try:
            return text.encode(args.file.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {args.file}: {error}") from error
    return text.encode(sys.stdin.read() if args.prompt == "-" else args.prompt)


def report(stats: GenerationStats, start_seconds: float) -> dict[str, object]:
    """Everything about the run, for people (on standard error) and for ``--stats-json``."""
    result = {
        "device": command_line.device_name(),
        "start_seconds": round(start_seconds, 3),
        **dataclasses.asdict(stats),
        "prefill_tokens_per_second": round(stats.prefill_tokens_per_second, 2),
        "decode_tokens_per_second": round(stats.decode_tokens_per_second, 2),
    }
    kinds = ", ".join(f"{kind} {size:,}" for kind, size in stats.cache_bytes.items())
    print(
        f"\n{stats.prompt_tokens} prompt tokens, first new one after "
        f"{stats.time_to_first_token_s * 1e3:.0f} ms; {stats.new_tokens} new tokens, "
        f"{stats.decode_tokens_per_second:.1f} tokens/s on {result['device']} "
        f"(loading and compiling {start_seconds:.1f} s)\ncache bytes by kind: {kinds}",
        file=sys.stderr,
    )
    return result


def main() -> int:
    """Loads, checks, generates, reports."""
    args = parse(sys.argv[1:])
    sampling = SamplingOptions(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed
    )
    if args.context < 1:
        raise UserError(f"--context must be at least 1, got {args.context}")
    command_line.use_compilation_cache()
    began = time.perf_counter()
    model = load_model(args.checkpoint)
    text = None
    if args.token_ids is None:
        text = load_text(args.checkpoint, model.config.vocab_size)
    prompt = read_prompt(args, text)
    runtime = DeepseekV4Runtime(model, format=FORMATS.get(args.cache_format))
    options = default_options(runtime)
    if args.tile:
        options = dataclasses.replace(options, tile=args.tile)
    check_prompt(  # before anything is compiled
        runtime, prompt, max_new_tokens=args.max_new_tokens, capacity_tokens=args.context
    )
    generator = Generator(runtime, options, capacity_tokens=args.context)
    start_seconds = time.perf_counter() - began
    if args.echo and text is not None:
        print("".join(text.feed(int(t)) for t in prompt), end="")
    stats = GenerationStats(prompt_tokens=len(prompt))
    for token in generator.stream(
        prompt, max_new_tokens=args.max_new_tokens, sampling=sampling, stats=stats
    ):
        print(f"{token} " if text is None else text.feed(token), end="", flush=True)
    print()
    command_line.write_json(args.stats_json, report(stats, start_seconds))
    return 0


if __name__ == "__main__":
    command_line.run(main)
