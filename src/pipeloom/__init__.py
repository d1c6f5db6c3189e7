"""Pipeline-parallel training for PyTorch in which a schedule is a text.

Nothing here imports torch; the names that need it load it when they are first used.
"""

from pipeloom import schedules
from pipeloom.action import Action, Kind
from pipeloom.errors import PipeloomError, ScheduleError
from pipeloom.problem import Problem
from pipeloom.schedule import Schedule
from pipeloom.wiring import Wiring

__version__ = "0.1.0"

__all__ = ["Action", "Kind", "PipeloomError", "Problem", "Schedule", "ScheduleError", "schedules", "Wiring"]
