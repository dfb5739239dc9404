"""Trains the small byte-level DeepSeek-V4 on Shakespeare's plays, exports it, evaluates it.

python scripts/train.py --run runs/shakespeare --minutes 75 --export data/shakespeare
python scripts/train.py --run runs/shakespeare --minutes 75 --resume --export data/shakespeare
python scripts/train.py --evaluate data/shakespeare --json docs/model_card.json
"""

import argparse
import dataclasses
import sys
from typing import Any

import command_line
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from models.deepseek_v4.config import load_config
from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.parallel import ParallelOptions
from models.deepseek_v4.weights import load_safetensors
from models.training import corpus, evaluate, preset
from models.training.batches import BatchOptions
from models.training.checkpoints import Checkpoints
from models.training.export import check_targets, export_curve, export_model
from models.training.run import Limits, Run, RunOptions
from models.training.schedule import Schedule

CONSOLE = Console()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", default="runs/shakespeare", help="folder of the checkpoints")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--minutes", type=float, help="training time, over all resumptions")
    limit.add_argument("--steps", type=int, help="steps, over all resumptions")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--export", metavar="DIR", help="write config.json and model.safetensors")
    parser.add_argument("--curve", metavar="PNG", help="write the loss curve, and a JSON beside it")
    parser.add_argument("--evaluate", metavar="DIR", help="evaluate an exported model instead")
    parser.add_argument("--sequences", type=int, help="held-out sequences at most (default: all)")
    parser.add_argument("--json", metavar="FILE", help="write the evaluation's numbers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--recall-share", type=float, default=0.5, help="sequences with the task")
    parser.add_argument("--answer-weight", type=float, default=4.0, help="what an answer counts")
    parser.add_argument("--dense", type=float, default=0.4, help="share of the run before picks")
    parser.add_argument("--decay", type=float, default=0.75, help="where the decay begins, 0 to 1")
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=0.004)
    options = parser.parse_args(arguments)
    if not (options.evaluate or options.resume or options.minutes or options.steps):
        parser.error("nothing to do: pass --minutes or --steps, --resume, or --evaluate DIR")
    return options


def train(options: argparse.Namespace) -> None:
    """Trains as the command line says, then writes what it asks for."""
    check_targets(options.export, options.curve)
    run = Run(
        preset.shakespeare_fields(),
        corpus.training_bytes(),
        RunOptions(
            seed=options.seed,
            batch=BatchOptions(
                size=options.batch,
                length=options.length,
                recall_share=options.recall_share,
                answer_weight=options.answer_weight,
            ),
            schedule=Schedule(dense=options.dense, decay=options.decay),
            muon_rate=options.muon_rate,
            adam_rate=options.adam_rate,
        ),
    )
    checkpoints = Checkpoints(options.run, run.identity)
    try:
        if options.resume:
            run.resume(checkpoints)
        else:
            checkpoints.start()
        seconds = None if options.minutes is None else options.minutes * 60
        if seconds is not None or options.steps is not None:
            _train(run, Limits(steps=options.steps, seconds=seconds), checkpoints)
    finally:
        checkpoints.close()
    if options.export:
        export_model(run.model, preset.shakespeare_fields(), options.export)
    if options.curve:
        export_curve(run.progress.curve, options.curve)


def _train(run: Run, limits: Limits, checkpoints: Checkpoints) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=CONSOLE, disable=not CONSOLE.is_terminal) as progress:
        task = progress.add_task("training", total=1.0)

        def report(fraction: float, record: dict[str, float]) -> None:
            answers = record.get("answer_accuracy", float("nan"))
            line = (
                f"step {record['step']:5.0f}  loss {record['loss']:.3f}  recall {answers:.2f}  "
                f"indexer {record['indexer_loss']:.3f}  load {record['imbalance']:.2f}  "
                f"{record['bytes_per_second']:.0f} B/s"
            )
            progress.update(task, completed=fraction, description=line)
            if not CONSOLE.is_terminal:
                print(f"{fraction:6.1%}  rate {record['rate']:.2f}  {line}", flush=True)

        run.train(limits, checkpoints, report)


def evaluate_export(options: argparse.Namespace) -> None:
    """Prints bits per byte and recall of an exported model, whole and with parts taken out."""
    config = load_config(options.evaluate)
    model = DeepseekV4(config, nnx.Rngs(0))
    load_safetensors(model, options.evaluate)
    text = corpus.held_out_bytes()
    settings = evaluate.EvaluationOptions(length=options.length, sequences=options.sequences)
    everything = ParallelOptions(sparse=False, dense_experts=True)
    variants = {
        "whole model": (model, settings),
        "all rows instead of the indexer's picks": (
            model,
            dataclasses.replace(settings, forward=everything),
        ),
        "index scores zeroed": (evaluate.without_indexer(model), settings),
        "compressed rows zeroed": (evaluate.without_compressed_rows(model), settings),
    }
    results: dict[str, Any] = {}
    for name, (variant, conditions) in variants.items():
        cells = evaluate.recall_by_distance(variant, text, conditions)
        results[name] = {
            "bits_per_byte": round(evaluate.bits_per_byte(variant, text, conditions), 4),
            "recall": [cell._asdict() for cell in cells],
        }
    _print(results)
    command_line.write_json(options.json, results)


def _print(results: dict[str, Any]) -> None:
    print("held-out plays: bits per byte, and recall accuracy by distance in tokens")
    table = Table()
    table.add_column("")
    table.add_column("bits/byte", justify="right")
    cells = next(iter(results.values()))["recall"]
    for cell in cells:
        table.add_column(f"{cell['low']}+", justify="right")
    for name, result in results.items():
        recall = [f"{cell['accuracy']:.0%}" if cell["asked"] else "-" for cell in result["recall"]]
        table.add_row(name, f"{result['bits_per_byte']:.3f}", *recall)
    table.add_row("answers", "", *(str(cell["asked"]) for cell in cells))
    CONSOLE.print(table)


def main() -> int:
    """Runs the command line."""
    options = parse(sys.argv[1:])
    if options.evaluate:
        evaluate_export(options)
    else:
        train(options)
    return 0


if __name__ == "__main__":
    command_line.run(main)
