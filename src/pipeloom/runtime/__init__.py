"""Runs lowered schedules over torch.distributed."""

from pipeloom.runtime import reference
from pipeloom.runtime.overlap import Part
from pipeloom.runtime.pipeline import Pipeline
from pipeloom.runtime.stage import Stage

__all__ = ["Part", "Pipeline", "Stage", "reference"]
