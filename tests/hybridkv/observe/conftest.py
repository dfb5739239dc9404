import pytest
from engines import renewed, toy_lab


@pytest.fixture
def lab():
    """The compiled engine of the TOY model, empty; after the test nothing may be left in it."""
    with renewed(toy_lab()) as lab:
        yield lab
