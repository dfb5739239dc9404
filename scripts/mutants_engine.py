"""Faults of the engine, for ``mutants.py``."""

from mutant import Mutant

ENGINE = "hybridkv/engine/engine.py"
SCHEDULER = "hybridkv/engine/scheduler.py"
SEATING = "hybridkv/engine/seating.py"
PARKING = "hybridkv/engine/parking.py"
T_SCHEDULER = "tests/hybridkv/engine/test_scheduler.py"
T_PARKING = "tests/hybridkv/engine/test_parking.py"
T_FOLLOWING = "tests/hybridkv/engine/test_following.py"
T_IDLE = "tests/hybridkv/engine/test_idle.py"
T_RESTORES = "tests/hybridkv/engine/test_restores.py"
T_CANCEL = "tests/hybridkv/engine/test_engine_cancel.py"
T_SAMPLING = "tests/hybridkv/engine/test_sampling.py"
T_STOPS = "tests/hybridkv/engine/test_stops.py"
T_PROBE = "tests/hybridkv/engine/test_probe.py"

ENGINE_MUTANTS = (
    Mutant(
        "waiting raises nobody's level",
        SCHEDULER,
        "return job.priority + (now - job.arrived) / self.aging_s",
        "return float(job.priority)",
        (T_SCHEDULER,),
    ),
    Mutant(
        "smaller requests pass one without room for ever",
        SCHEDULER,
        "strict = now - job.arrived >= options.patience_s",
        "strict = False",
        (T_SCHEDULER,),
    ),
    Mutant(
        "requests are preempted although that does not help",
        SCHEDULER,
        "return tuple(chosen) if slots > 0 and blocks >= head.blocks else ()",
        "return tuple(chosen)",
        (T_SCHEDULER,),
    ),
    Mutant(
        "equals are preempted",
        SCHEDULER,
        "options.level(job, now) < head.priority",
        "job.priority <= head.priority",
        (T_SCHEDULER,),
    ),
    Mutant(
        "a parked sequence comes back without its own blocks",
        PARKING,
        "if (part < runner.sizes.capacity.blocks).any():",
        "if (part >= runner.sizes.capacity.blocks).all():",
        (T_PARKING,),
    ),
    Mutant(
        "blocks that were taken again pass for those of a parked sequence",
        PARKING,
        "same = columns.generation[entries] == parked.generations",
        "same = np.ones(len(entries), bool)",
        (T_PARKING,),
    ),
    Mutant(
        "damaged parked bytes are used",
        PARKING,
        "if digest_of(parked.moves, parked.state) != parked.digest:",
        "if False:",
        (T_PARKING,),
    ),
    Mutant(
        "open cells are left behind at parking",
        "hybridkv/state/transfer.py",
        'return jax.tree.map(lambda rows: rows.at[slot].get(mode="clip"), cache.sequence)',
        "return jax.tree.map(lambda rows: 0 * rows[0], cache.sequence)",
        (T_PARKING,),
    ),
    Mutant(
        "rows of decode steps pass for canonical ones",
        "hybridkv/engine/generated.py",
        "self._inexact |= self._keys(entries)",
        "pass",
        (T_IDLE,),
    ),
    Mutant(
        "a cancelled request keeps the room it was restored into",
        SEATING,
        "        if task.hold is not None:\n            self._runner.drop(task.hold)\n",
        "",
        (T_RESTORES, T_CANCEL),
    ),
    Mutant(
        "a load goes on writing after its request has ended",
        SEATING,
        "            task.ticket.cancel()\n        if task.hold is not None",
        "            pass\n        if task.hold is not None",
        ("tests/scenarios/test_abort.py", T_RESTORES),
    ),
    Mutant(
        "fork points are not published when they are reached",
        ENGINE,
        "elif sequence.computed in sequence.forks:",
        "elif False:",
        (T_FOLLOWING,),
    ),
    Mutant(
        "noise belongs to the slot",
        "hybridkv/engine/sampling.py",
        "jax.random.key(options.seed), position)",
        "jax.random.key(options.seed), position + options.slots)",
        (T_SAMPLING,),
    ),
    Mutant(
        "text that may begin a stop string is shown",
        "hybridkv/engine/stops.py",
        "shown = len(text) - self._could_begin(text)",
        "shown = len(text)",
        (T_STOPS,),
    ),
    Mutant(
        "idle slots' experts pass for active ones'",
        "models/deepseek_v4/experts.py",
        "return place, expert[first], first,",
        "return own, expert[first], first,",
        ("tests/models/deepseek_v4/test_experts.py", "tests/models/deepseek_v4/test_exactness.py"),
    ),
)
