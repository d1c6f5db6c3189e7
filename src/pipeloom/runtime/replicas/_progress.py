"""How far the replicas of a rank have come, which matters when a step fails."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence

import torch.distributed as dist

from pipeloom.errors import PipelineError

_PATIENCE = datetime.timedelta(seconds=10)
"""How long a rank waits to hear that its replicas have failed too."""

_numbers = itertools.count()


class Progress:
    """Counts the collective calls over replicas.

    The next call of one replica meets the next call of the others, whatever it is for. So after a failed step replicas
    may go on together if they have made the same number of calls, and not otherwise.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.failed = False
        self._failures = 0
        self._name = f"pipeloom/progress/{next(_numbers)}"

    def compare(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """After a failure, ask the replicas, the product of `groups`, how far they are.

        They are asked by way of the store that all processes share, where no call is waiting for another.

        Raises:
            PipelineError: they are not where this rank is.
        """
        if not self.failed:
            return
        self._failures += 1
        store = dist.distributed_c10d._get_default_store()
        key = f"{self._name}/{self._failures}"
        store.set(f"{key}/{dist.get_rank()}", str(self.calls))
        for group in groups:
            keys = {rank: f"{key}/{rank}" for rank in dist.get_process_group_ranks(group)}
            try:
                store.wait(list(keys.values()), _PATIENCE)
            except dist.DistStoreError:
                raise _refusal("a step failed on this rank, but not on all of its replicas") from None
            found = {rank: int(store.get(each)) for rank, each in keys.items()}
            if len(set(found.values())) > 1:
                where = ", ".join(f"rank {rank} after {calls}" for rank, calls in found.items())
                raise _refusal(f"a step failed at different places of the replicas' exchange ({where} calls)")
        self.failed = False


def _refusal(what: str) -> PipelineError:
    return PipelineError(
        f"{what}, so what they exchange next would not fit together; start all ranks again, from a checkpoint"
    )
