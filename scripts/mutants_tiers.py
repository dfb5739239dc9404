"""Faults of the host and disk tiers, for ``mutants.py``."""

from mutant import Mutant

STORING = "hybridkv/tiers/storing.py"
MOVER = "hybridkv/tiers/mover.py"
T_STORING = "tests/hybridkv/tiers/test_storing.py"
T_MOVER = "tests/hybridkv/tiers/test_mover.py"
T_DISK = "tests/hybridkv/tiers/test_disk_tier.py"
T_HOST = "tests/hybridkv/tiers/test_host_tier.py"
T_LOADS = "tests/hybridkv/prefixes/test_plan_loads.py"

TIER_MUTANTS = (
    Mutant(
        "a prefix pushes its own blocks out of a tier",
        STORING,
        "held = self._device.allocator.lease(run)",
        "held = self._device.allocator.lease(run[:0])",
        (T_STORING,),
    ),
    Mutant(
        "rows of decode steps reach the disk",
        STORING,
        "& self._device.exact(ids)",
        "",
        (T_STORING, T_DISK),
    ),
    Mutant(
        "what is removed meanwhile passes for stored",
        STORING,
        "and not self._to_disk and self._removing is None:",
        "and not self._to_disk:",
        (T_STORING,),
    ),
    Mutant(
        "a full store is left as it is",
        STORING,
        "count = min(allocator.evictable(Form.BLOCK, Tier.DISK), wanted)",
        "count = 0",
        (T_STORING,),
    ),
    Mutant(
        "a load is given up while somebody waits for it",
        MOVER,
        "if load.waiters or load.ended:",
        "if load.ended:",
        (T_MOVER,),
    ),
    Mutant(
        "what stands on a damaged block stays",
        "hybridkv/tiers/disk.py",
        "directory.withdraw(directory.above(alone), ",
        "directory.withdraw(alone, ",
        (T_MOVER,),
    ),
    Mutant(
        "bytes of the host are not compared",
        "hybridkv/tiers/host.py",
        "if now[kind] != digest:",
        "if False:",
        (T_HOST, T_MOVER),
    ),
    Mutant(
        "bytes of a store are not compared",
        "hybridkv/tiers/store/reading.py",
        "if digest != checks[kind]:",
        "if False:",
        ("tests/hybridkv/tiers/test_store_damage.py",),
    ),
    Mutant(
        "loads cost nothing",
        "hybridkv/prefixes/plan.py",
        "seconds = load[at] + tiles(positions[at]) + state",
        "seconds = tiles(positions[at]) + state",
        (T_LOADS,),
    ),
    Mutant(
        "a copy on a slower tier is worth as much as none",
        "hybridkv/blocks/eviction.py",
        "each = np.where(copied, self.copied_share * each, each)",
        "pass",
        ("tests/hybridkv/blocks/test_eviction.py",),
    ),
)
