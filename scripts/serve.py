"""Serves a model over HTTP as OpenAI's API does: completions and chats, streamed or not.

    python scripts/serve.py                                    # http://127.0.0.1:8000/v1
    python scripts/serve.py --model smollm2 --context 4096 --slots 4
    python scripts/serve.py --host 0.0.0.0 --api-keys keys.txt --store ~/prefixes
    python scripts/serve.py --rollout rollout.json             # reuse as far as it is trusted

One process, one engine, or with --rollout two or three. Each API key is a tenant, whose prompts
share prefixes with each other and with nobody else's. See docs/serving.md.
"""

import argparse
import asyncio
import dataclasses
import gc
import math
import pathlib
import socket
import sys
from typing import Any, TypeVar

import command_line
import decode_models
import serving_http
import serving_rollout

from hybridkv.engine.engine import Engine, EngineOptions
from hybridkv.engine.generate import default_options
from hybridkv.engine.generated import Publish
from hybridkv.engine.runner import RunnerOptions
from hybridkv.engine.sampling import MOST_LOGPROBS
from hybridkv.engine.steps import check_tile
from hybridkv.errors import UserError
from hybridkv.observe.rollout_schemes import RolloutSchemes
from hybridkv.observe.shadow import cold_sizes
from hybridkv.state.batch import StepOptions
from hybridkv.state.capacity import Capacity
from models.deepseek_v4.runtime import DeepseekV4GenericRuntime, DeepseekV4Runtime
from models.text import Text

try:
    import uvicorn
    from serving_app import ServerOptions, is_loopback, make_app
    from serving_engine import EngineThread
    from serving_prompts import Served
    from serving_tenants import Keys
except ImportError as missing:
    if missing.name not in ("fastapi", "pydantic", "starlette", "uvicorn"):
        raise
    command_line.fail(f"{missing.name} is missing: pip install -e '.[serve]'")

T = TypeVar("T")
AFTER_GRACE_S = 5.0
"""Seconds for cancelled answers to be sent before connections are cut."""
KEEP_ALIVE_S = 65


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    decode_models.add_arguments(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; the default is this machine's")
    add("--port", type=int, default=8000, help="0: a free one")
    add("--served-name", help="the model's name in requests; its folder or --model otherwise")
    add("--api-keys", type=pathlib.Path, help="file of keys that may ask, one a line")
    add("--allow-anyone", action="store_true", help="listen beyond this machine without --api-keys")
    add("--allow-host", action="append", default=[], help="another name in Host headers")
    add("--slots", type=int, default=4, help="choices that run at once")
    add("--max-waiting", type=int, default=64, help="choices that wait for a slot; then 429")
    add("--max-body-bytes", type=int, default=ServerOptions.max_body_bytes)
    add("--default-max-tokens", type=int, help="of a chat that does not say; else the context")
    add("--request-timeout", type=float, help="seconds that a request may take")
    add("--grace", type=float, default=30.0, help="seconds for requests to finish at the end")
    add("--logprobs", type=int, default=5, help="likeliest tokens that may be asked for")
    add("--digests", action="store_true", help="tell a digest of all logits with each choice")
    keep = argparse.BooleanOptionalAction
    add("--ledger", action=keep, default=True, help="remember all tokens, to blame what is lost")
    add("--scheme", choices=decode_models.SCHEMES, default="hybrid")
    add("--publish", choices=[x.value for x in Publish], default="canonical")
    add("--store", type=pathlib.Path, help="folder of prefixes that outlive this")
    add("--host-tokens", type=int, default=0, help="room in host memory")
    add("--rollout", type=pathlib.Path, metavar="STATE", help="state file of scripts/rollout.py")
    add("--rollout-safe", choices=serving_rollout.SAFE, default="cold", help="serves else")
    add("--rollout-options", type=pathlib.Path, metavar="JSON", help="shares and thresholds")
    parser.set_defaults(token_ids=None)
    return parser.parse_args(argv)


def check_arguments(args: argparse.Namespace) -> None:
    """Refuses sizes out of range, and an open door that nobody asked for.

    Raises:
      UserError: either.
    """
    own = {"slots": 1, "max_body_bytes": 1, "max_waiting": 0, "port": 0, "host_tokens": 0}
    own |= {"grace": 0, "logprobs": 0, "default_max_tokens": 1}
    command_line.check_least(args, decode_models.LEAST | own)
    if args.logprobs > MOST_LOGPROBS:
        raise UserError(f"--logprobs must be at most {MOST_LOGPROBS}, got {args.logprobs}")
    if args.port > 65535:
        raise UserError(f"--port must be at most 65535, got {args.port}")
    if not math.isfinite(args.grace):
        raise UserError(f"--grace must be a number of seconds, got {args.grace}")
    if args.request_timeout is not None and not args.request_timeout > 0:
        raise UserError(f"--request-timeout must be above 0, got {args.request_timeout}")
    if args.rollout is None and (args.rollout_options or args.rollout_safe != "cold"):
        raise UserError("--rollout-safe and --rollout-options are for --rollout STATE")
    if args.rollout is not None and args.scheme != "hybrid":
        raise UserError("--rollout chooses the scheme of each request: leave --scheme out")
    if args.rollout is not None and not args.rollout.absolute().parent.is_dir():
        raise UserError(f"--rollout: there is no folder {args.rollout.parent}")
    if not is_loopback(args.host) and args.api_keys is None and not args.allow_anyone:
        raise UserError(
            f"whoever reaches {args.host} could use this server: give --api-keys FILE, or "
            "--allow-anyone if that is meant"
        )


def make(args: argparse.Namespace, runtime: Any, text: Text) -> Engine | RolloutSchemes:
    """What the command line asks for: an engine, or those of a rollout.

    Raises:
      UserError: the options of the rollout cannot be read.
    """
    if args.rollout is None:
        return make_engine(args, runtime, text)

    def engine(scheme: str) -> Engine:
        own = runtime
        if scheme == "generic":  # of the same weights
            own = DeepseekV4GenericRuntime(runtime.module)
        return make_engine(args, own, text, cold=scheme != "hybrid")

    choices = serving_rollout.read_choices(args.rollout_options)
    return serving_rollout.make_schemes(
        engine, args.rollout, choices, safe=args.rollout_safe, text=text
    )


def settled(made: T) -> T:
    """The same; what there is by now is not looked at by the garbage collector any more.

    That is all of JAX and the compiled steps: looking through it stops every request for some
    hundred milliseconds, now and then.
    """
    gc.collect()
    gc.freeze()
    return made


def step_options(args: argparse.Namespace, runtime: Any) -> StepOptions:
    """How the steps of the engine compute.

    Raises:
      UserError: the tile does not fit the model.
    """
    steps = default_options(runtime)
    if args.tile is not None:
        steps = dataclasses.replace(steps, tile=args.tile)
    check_tile(runtime.geometry, steps.tile)
    return steps


def make_engine(
    args: argparse.Namespace, runtime: Any, text: Text, *, cold: bool = False
) -> Engine:
    """The engine that the command line asks for, or the one that runs the same without reuse."""
    steps = step_options(args, runtime)
    one = Capacity.for_tokens(runtime.geometry, tokens=args.context + steps.tile)
    # One sequence's room beyond what runs, for what is stored.
    capacity = dataclasses.replace(one, slots=args.slots, blocks=one.blocks * (args.slots + 1))
    sizes = RunnerOptions(
        capacity=capacity,
        snapshots=args.snapshots,
        reuse=args.scheme != "off",
        ledger=args.ledger,
        tiers=decode_models.tiers(args, runtime, args.store),
    )
    options = EngineOptions(
        publish=Publish(args.publish),
        logprobs=args.logprobs,
        digests=args.digests or args.rollout is not None,  # by which runs are compared
    )
    return Engine(runtime, steps, cold_sizes(sizes) if cold else sizes, options, text=text)


def served(args: argparse.Namespace, runtime: Any, text: Text) -> Served:
    """What requests depend on."""
    name = args.served_name
    if name is None:
        name = args.model if args.checkpoint is None else args.checkpoint.resolve().stem
    return Served(
        name=name,
        runtime=runtime,
        text=text,
        context=args.context,
        logprobs=args.logprobs,
        choices=args.slots + args.max_waiting,
        template=text.chats if args.chat is None else args.chat,
        default_tokens=args.default_max_tokens,
        timeout_s=args.request_timeout,
    )


class Server(uvicorn.Server):
    """Ends in order: takes nothing new, lets what runs end within a time, cancels the rest.

    It ends by itself where the engine cannot be made: it would never serve anything.
    """

    def __init__(self, config: uvicorn.Config, thread: EngineThread, grace_s: float) -> None:
        super().__init__(config)
        self._engine_thread, self._grace_s = thread, grace_s

    async def on_tick(self, counter: int) -> bool:
        """Whether to end; see the class."""
        return await super().on_tick(counter) or self._engine_thread.unmade is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See the class; then as uvicorn does."""
        self._engine_thread.stop_taking()
        loop = asyncio.get_running_loop()
        cancelling = loop.call_later(self._grace_s, self._engine_thread.cancel_all)
        try:
            await super().shutdown(sockets)
        finally:
            cancelling.cancel()


def make_server(app: Any, thread: EngineThread, *, host: str, port: int, grace_s: float) -> Server:
    """A server of an application, not yet listening."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop=serving_http.event_loop(),
        http=serving_http.http_protocol(),
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(grace_s + AFTER_GRACE_S),
    )
    return Server(config, thread, grace_s)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
      UserError: the address is taken, none of this machine, or none at all.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except UnicodeError as error:
        raise UserError(f"cannot listen on {host}: that is no name of a machine") from error
    except OSError as error:
        raise UserError(f"cannot listen on {host} port {port}: {error.strerror}") from error


def main() -> int:
    """Loads the model, listens, and serves until it is told to end.

    Returns 1 where the engine could not be made; the log says why.

    Raises:
      UserError: the command line asks for what cannot be.
    """
    args = parse(sys.argv[1:])
    check_arguments(args)
    keys = Keys.read(args.api_keys)
    command_line.log_to_stderr()
    command_line.use_compilation_cache()
    runtime, text = decode_models.load(args)
    assert text is not None  # only token ids go without
    model = served(args, runtime, text)
    if model.template and not text.chats:
        raise UserError("this model has no chat template: leave --chat out")
    if args.rollout_safe == "generic" and not isinstance(runtime, DeepseekV4Runtime):
        raise UserError("this model's cache is generic already: leave --rollout-safe out")
    serving_rollout.read_choices(args.rollout_options)  # refused before anything is compiled
    step_options(args, runtime)
    thread = EngineThread(
        lambda: settled(make(args, runtime, text)), slots=args.slots, max_waiting=args.max_waiting
    )
    hosts = frozenset(args.allow_host) if is_loopback(args.host) else None
    app = make_app(
        model, keys, thread, ServerOptions(max_body_bytes=args.max_body_bytes, hosts=hosts)
    )
    with listen(args.host, args.port) as sock:
        host = f"[{args.host}]" if ":" in args.host else args.host
        url = f"http://{host}:{sock.getsockname()[1]}/v1"
        print(f"{model.name} at {url}, ready when /health says so", file=sys.stderr, flush=True)
        server = make_server(app, thread, host=args.host, port=args.port, grace_s=args.grace)
        server.run(sockets=[sock])
    if isinstance(thread.unmade, UserError):
        raise thread.unmade
    return 0 if thread.unmade is None else 1


if __name__ == "__main__":
    command_line.run(main)
