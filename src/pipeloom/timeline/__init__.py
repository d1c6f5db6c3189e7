"""Timelines: what ran when, simulated or measured, and what follows from it."""

from pipeloom.timeline._causes import Cause
from pipeloom.timeline._measured import measured_costs
from pipeloom.timeline._timeline import ROUNDING, Event, Idle, Timeline

__all__ = ["ROUNDING", "Cause", "Event", "Idle", "Timeline", "measured_costs"]
