import zlib

import pytest

from scenarios.runs import Bench, assert_at_rest, toy_runner


@pytest.fixture(scope="session")
def runner():
    """One compiled runner for all scenarios: each test has namespaces of its own in it."""
    return toy_runner()


@pytest.fixture
def bench(runner, request):
    """Runs prompts on the compiled runner; afterwards nothing may be held."""
    yield Bench(runner, zlib.crc32(request.node.name.encode()))
    assert_at_rest(runner)
