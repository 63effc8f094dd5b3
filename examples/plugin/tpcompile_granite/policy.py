"""A scheduling policy: round-robin that starts with the last worker of each rank."""

from tpcompile.vm.schedule.policies import Queues, Work, policy


@policy("mirrored")
def mirrored(work: Work) -> Queues:
    """Deal the instructions of each rank out to its workers, from the last worker to the first."""
    return tuple(
        tuple(numbers[work.workers - 1 - worker :: work.workers])
        for numbers in work.by_rank()
        for worker in range(work.workers)
    )
