"""Strict numerics for every test: what is implicit elsewhere is an error here."""

import pathlib

import jax
import pytest
from places import REPOSITORY

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def oracles() -> pathlib.Path:
    return REPOSITORY / "tests" / "data" / "oracle"
