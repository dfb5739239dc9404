"""Reuse rolled out in the server: who serves, what is told, and faults that are rolled back."""

import json
import sys
import time

import pytest
from commands import status
from engines import toy_lab
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import rollout as rollout_command
import serve
import verify_shadow
from served import DOCUMENT, World, ask, completion, error
from serving_engine import State
from serving_rollout import make_schemes, read_choices

from hybridkv.engine.engine import Engine, EngineOptions
from hybridkv.errors import UserError
from hybridkv.observe.rollout import RolloutStage
from hybridkv.observe.rollout_file import RolloutFile
from hybridkv.observe.shadow import cold_sizes
from hybridkv.observe.thresholds import Side
from hybridkv.prefixes.losses import Cause


@pytest.fixture(scope="module")
def cold():
    """Beside the engine that other tests compile too."""
    reuse = toy_lab().engine
    engine = Engine(
        reuse.runner.model,
        reuse.runner.options,
        cold_sizes(reuse.runner.sizes),
        EngineOptions(digests=True),
        identity=reuse.runner.identity,
        clock=toy_lab().time,
    )
    reuse._guard.arm()  # what the other compiled is none of its compilations
    return engine


@pytest.fixture
def rolled(cold, tmp_path):
    """A world whose thread runs a rollout, every eligible request twice, and looks at the file at
    every turn.
    """
    lab = toy_lab()
    lab.renew()
    cold.reset()
    world = World(lab)
    lab.change(text=world.text)
    cold._text = world.text
    options = tmp_path / "options.json"
    options.write_text(json.dumps({"shadow": {"share": 1.0}, "refresh_s": 0.0}))
    world.state, world.cold = tmp_path / "rollout.json", cold
    world.thread._make = lambda: make_schemes(
        {"hybrid": lab.engine, "cold": cold}.__getitem__,
        world.state,
        read_choices(options),
        safe="cold",
        text=world.text,
    )
    yield world
    assert world.thread.close(timeout_s=10)
    assert world.thread.state in (State.STOPPED, State.FAILED)
    lab.renew()
    cold._text = None


def person(monkeypatch, world, *arguments):
    """What ``scripts/rollout.py`` does, in this process."""
    command, *rest = map(str, arguments)
    said = ["--by", "ada", "--reason", "a test"]
    assert status(rollout_command.main, monkeypatch, command, world.state, *rest, *said) == 0


def health(app):
    return ask(app, "/health", method="GET").json()["rollout"]


def until(app, **wanted):
    """Waits for what /health is to say."""
    end = time.monotonic() + 20
    while True:
        told = health(app)
        if all(told[name] == value for name, value in wanted.items()):
            return told
        assert time.monotonic() < end, told
        time.sleep(0.005)


def metric(app, name):
    lines = ask(app, "/metrics", method="GET").text.splitlines()
    (line,) = [x for x in lines if x.startswith(f"hybridkv_{name} ")]
    return float(line.rpartition(" ")[2])


def asked(app, prompt=DOCUMENT, **more):
    """The scheme that served, cached tokens, text and digest."""
    answer = ask(app, json=completion(prompt, **more))
    assert answer.status_code == 200, answer.text
    told = answer.json()
    choice = told["choices"][0]
    cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert int(answer.headers["x-hybridkv-reused-tokens"]) == cached
    own = choice["hybridkv"]
    return own["scheme"], cached, choice["text"], own["logits_digest"]


def forward(monkeypatch, world, app, to, *more):
    person(monkeypatch, world, "forward", "--to", to, *more)
    until(app, stage=to)


def test_a_person_goes_forward_and_back_while_the_server_runs(rolled, monkeypatch):
    pytest.importorskip("prometheus_client")
    app = rolled.app()
    assert health(app) == {
        "stage": "off", "percent": 0.0, "rolled_back": False, "rollbacks": 0, "serving": "off",
    }  # fmt: skip
    first = asked(app)
    assert first[:2] == ("cold", 0)
    assert asked(app) == first
    forward(monkeypatch, rolled, app, "shadow")
    assert [asked(app) for _ in range(2)] == [first, first]
    while metric(app, "rollout_running"):
        time.sleep(0.005)
    assert metric(app, "rollout_compared_total") == 2
    assert metric(app, 'rollout_stage{stage="shadow"}') == 1
    forward(monkeypatch, rolled, app, "percent", "--percent", "99.9")
    scheme, cached, *bits = asked(app)
    assert (scheme, bits) == ("hybrid", list(first[2:]))
    assert 64 <= cached < len(DOCUMENT), "what it shadowed it has"
    person(monkeypatch, rolled, "back", "--to", "off")
    until(app, stage="off", serving="off")
    assert asked(app) == first
    assert metric(app, 'rollout_served_total{scheme="cold"}') == 5
    assert metric(app, 'compilations_total{engine="hybrid"}') == 0


def test_which_requests_reuse_serves_is_the_same_every_time(rolled, monkeypatch):
    app = rolled.app()
    forward(monkeypatch, rolled, app, "shadow")
    forward(monkeypatch, rolled, app, "percent", "--percent", "50")
    prompts = [DOCUMENT[:20] + letter for letter in "abcdefghij"]
    once = [asked(app, prompt, max_tokens=1)[0] for prompt in prompts]
    assert {"hybrid", "cold"} == set(once)
    assert [asked(app, prompt, max_tokens=1)[0] for prompt in prompts] == once


def test_a_planted_fault_is_rolled_back_and_told(rolled, monkeypatch, caplog):
    pytest.importorskip("prometheus_client")
    app = rolled.app()
    forward(monkeypatch, rolled, app, "shadow")
    forward(monkeypatch, rolled, app, "percent", "--percent", "50")
    forward(monkeypatch, rolled, app, "full")
    cold = asked(app)
    with verify_shadow.faulty(rolled.engine, verify_shadow.FAULTS["window"]):
        assert asked(app)[0] == "hybrid"
        told = until(app, stage="off")
        assert told["cause"] == "mismatch"
        assert (told["rolled_back"], told["rollbacks"]) == (True, 1)
        assert asked(app) == ("cold", 0, *cold[2:])
    assert metric(app, 'rollout_rollbacks_total{cause="mismatch"}') == 1
    assert metric(app, "rollout_mismatches_total") == 1
    assert metric(app, "rollout_rolled_back") == 1
    assert RolloutFile(rolled.state).read().stage is RolloutStage.OFF
    assert "other bits than a cold run" in caplog.text
    forward(monkeypatch, rolled, app, "shadow")
    assert not health(app)["rolled_back"]


@pytest.mark.parametrize("where", ["p99", "misses"])
def test_slow_reuse_and_lost_prefixes_roll_back(rolled, monkeypatch, where):
    app = rolled.app()
    forward(monkeypatch, rolled, app, "shadow")
    judge = rolled.thread.backend.schemes.judge

    def spoil(engine):
        for _ in range(300):
            judge.note_first(Side.SAFE, 0.1)
            judge.note_first(Side.REUSE, 1.0)

    def lose(engine):
        for _ in range(100):
            judge._misses.note((100, *(90 * (cause is Cause.LAYOUT) for cause in Cause)))

    rolled.thread.call(spoil if where == "p99" else lose).result()
    told = until(app, stage="off")
    assert told["cause"] == {"p99": "first_token", "misses": "misses"}[where]
    assert asked(app)[0] == "cold"


@pytest.mark.parametrize("stream", [False, True])
def test_a_shadow_engine_that_raises_is_told_and_touches_no_answer(
    rolled, monkeypatch, caplog, stream
):
    pytest.importorskip("prometheus_client")
    app = rolled.app()
    alone = asked(app)
    forward(monkeypatch, rolled, app, "shadow")

    def fail(*_):
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(rolled.engine.runner, "advance", fail)
        if stream:
            answer = ask(app, json=completion(DOCUMENT, stream=True))
            assert answer.text.endswith("data: [DONE]\n\n")
            assert alone[3] in answer.text
        else:
            assert asked(app) == alone
        told = until(app, stage="off")
    assert told["cause"] == "fault"
    assert rolled.thread.state is State.READY
    assert metric(app, 'rollout_faults_total{scheme="hybrid"}') == 1
    assert metric(app, 'rollout_dropped_total{reason="fault"}') == 1
    assert metric(app, "rollout_mismatches_total") == 0
    assert "planted" in caplog.text
    assert asked(app) == alone


def test_an_engine_that_serves_and_raises_ends_its_requests_and_reuse(rolled, monkeypatch):
    app = rolled.app()
    forward(monkeypatch, rolled, app, "shadow")
    forward(monkeypatch, rolled, app, "percent", "--percent", "50")
    forward(monkeypatch, rolled, app, "full")
    with monkeypatch.context() as patch:
        patch.setattr(rolled.engine.runner, "advance", lambda *_: 1 / 0)
        assert error(ask(app, json=completion(DOCUMENT)))[:2] == (500, "internal_error")
        assert until(app, stage="off")["cause"] == "fault"
    assert asked(app)[0] == "cold"


def test_the_options_are_those_of_the_file(tmp_path):
    path = tmp_path / "options.json"
    path.write_text(
        '{"shadow": {"share": 0.5, "salt": "s"}, "under_way": "finish", "to": "shadow",'
        '"thresholds": {"mismatches": 2, "faults": null, "first_token_s": 1, '
        '"misses": {"no_snapshot": 0.5}}, "forget": false, "refresh_s": 2}'
    )
    choices = read_choices(path)
    assert choices.to is RolloutStage.SHADOW
    options = choices.options
    assert (options.shadow.share, options.shadow.salt) == (0.5, "s")
    assert (options.thresholds.mismatches, options.thresholds.faults) == (2, None)
    assert options.thresholds.misses == {Cause.NO_SNAPSHOT: 0.5}
    assert (options.forget, options.refresh_s, options.under_way.value) == (False, 2, "finish")
    assert read_choices(None).options.shadow.share == 0.05


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot read the options"),
        ("[]", "must be a JSON object"),
        ('{"share": 1}', "no option 'share'"),
        ('{"shadow": {"shares": 1}}', "no option 'shares'"),
        ('{"shadow": {"share": "1"}}', "share is '1': give a number"),
        ('{"shadow": {"share": 2}}', "a share of 2"),
        ('{"shadow": {"every": 0.5}}', "every is 0.5: give a whole number"),
        ('{"thresholds": {"misses": {"bad luck": 1}}}', "no option 'bad luck'"),
        ('{"thresholds": {"misses": {"layout": "1"}}}', "give a number"),
        ('{"under_way": "restart"}', "under_way is 'restart'"),
        ('{"to": "full"}', "off or shadow"),
        ('{"forget": 1}', "forget is 1: give a bool"),
        ('{"thresholds": {"window": null}}', "window is null"),
        ('{"shadow": {"every": null}}', "every is null"),
        ('{"refresh_s": null}', "refresh_s is null"),
        ('{"refresh_s": -1}', "refresh_s must be a number from 0 on"),
        ('{"refresh_s": NaN}', "NaN is not JSON"),
        ('{"under_way": []}', "under_way is \\[\\]"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(tmp_path, text, says):
    path = tmp_path / "options.json"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        read_choices(path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rollout", "x", "--scheme", "off"], "leave --scheme out"),
        (["--rollout", "/proc/none/x"], "there is no folder /proc/none"),
        (["--rollout-safe", "generic"], "are for --rollout STATE"),
        (["--rollout-options", "x"], "are for --rollout STATE"),
    ],
)
def test_arguments_of_a_rollout_that_cannot_be_meant_are_refused(arguments, says):
    with pytest.raises(UserError, match=says):
        serve.check_arguments(serve.parse(arguments))


def test_the_engines_of_a_rollout_keep_digests_and_only_one_reuses(monkeypatch, tmp_path):
    made = {}

    def take(engine, state, choices, *, safe, text):
        made.update({name: engine(name) for name in ("hybrid", "cold", safe)})
        return "schemes"

    monkeypatch.setattr(serve, "Engine", lambda runtime, steps, sizes, options, text: (
        type(runtime).__name__, sizes.reuse, options.digests))  # fmt: skip
    monkeypatch.setattr(serve.serving_rollout, "make_schemes", take)
    runtime = toy_lab().engine.runner.model
    args = serve.parse(["--rollout", str(tmp_path / "s"), "--rollout-safe", "generic"])
    assert serve.make(args, runtime, None) == "schemes"
    own = type(runtime).__name__
    assert made == {
        "hybrid": (own, True, True),
        "cold": (own, False, True),
        "generic": ("DeepseekV4GenericRuntime", False, True),
    }
