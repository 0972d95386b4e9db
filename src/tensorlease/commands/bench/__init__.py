"""The command `tensorlease bench`: measures this installation, and compares within one run."""

from __future__ import annotations

from tensorlease.command_table import Command, LazyGroup

bench = LazyGroup(
    "bench",
    {
        "broker": Command(
            "tensorlease.commands.bench.broker:broker",
            "Rounds through a broker, against a relay that keeps no ledger.",
        ),
        "ledger": Command(
            "tensorlease.commands.bench.ledger:ledger", "The ledger alone, up to 10,000 receivers."
        ),
        "gpu": Command("tensorlease.commands.bench.gpu:gpu", "One GPU, against one copy."),
        "shm": Command("tensorlease.commands.bench.shm:shm", "Shared memory, against one memcpy."),
    },
    help="Measure this installation. Each command compares within one run: ratios count, times"
    " depend on the machine and on what else runs.",
)
