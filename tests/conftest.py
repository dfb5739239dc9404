"""Strict numerics for every test: what is implicit elsewhere is an error here."""

import pathlib

import jax
import pytest
from places import REPOSITORY

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Compiling is two thirds of the time. Files compile the same toy steps over and over: what one of
# them has compiled, the others and the next run load. The key is the program, flags and versions.
jax.config.update("jax_compilation_cache_dir", str(REPOSITORY / ".cache" / "jax-tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def oracles() -> pathlib.Path:
    return REPOSITORY / "tests" / "data" / "oracle"
