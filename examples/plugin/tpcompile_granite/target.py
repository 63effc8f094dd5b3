"""A target: a server with one CPU of 64 cores and twelve channels of memory."""

from tpcompile.vm.targets import Target, add_target

SERVER = add_target(
    Target(
        name="server-64",
        workers=64,
        bytes_per_us=460_000,
        instruction_us=1.5,
        exchange_us=1.0,
        link_bytes_per_us=100_000,
        macs_per_us=1_500_000,
        grain=16,
        spans=4,
    )
)
