"""Data parallelism inside a pipeline: gradients are averaged over replicas of a stage, whose weights may be sharded."""

from pipeloom.runtime.replicas._average import local
from pipeloom.runtime.replicas._replicas import Replicas

__all__ = ["Replicas", "local"]
