import zlib

import pytest
from engines import renewed, toy_lab

from scenarios.counting import counting_lab
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


@pytest.fixture
def lab():
    """An engine of the TOY model, for bits."""
    with renewed(toy_lab()) as lab:
        yield lab


@pytest.fixture
def counting():
    """An engine without arithmetic, for who runs when."""
    with renewed(counting_lab()) as lab:
        yield lab
