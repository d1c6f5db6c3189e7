"""Timelines: what ran when, simulated or measured, and what follows from it."""

from pipeloom.timeline._causes import Cause
from pipeloom.timeline._measured import measured_costs
from pipeloom.timeline._timeline import Event, Idle, Timeline

__all__ = ["Cause", "Event", "Idle", "Timeline", "measured_costs"]
