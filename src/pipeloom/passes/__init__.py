"""Passes: functions from a schedule to a schedule; whatever they add to the rows can be read and checked."""

from pipeloom.passes._communicate import communicate
from pipeloom.passes._forward_only import forward_only
from pipeloom.passes._lower import lower
from pipeloom.passes._merge_backward import merge_backward
from pipeloom.passes._reduce_grad import reduce_grad
from pipeloom.passes._shard import shard

__all__ = ["communicate", "forward_only", "lower", "merge_backward", "reduce_grad", "shard"]
