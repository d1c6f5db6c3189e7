"""Pipeline-parallel training for PyTorch in which a schedule is a text.

Nothing here imports torch; the names that need it load it when they are first used, as do other names that take long.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from pipeloom import schedules
from pipeloom.action import Action, Kind
from pipeloom.checker import check
from pipeloom.costs import Costs
from pipeloom.errors import PipeloomError, ScheduleError
from pipeloom.passes import forward_only, lower
from pipeloom.problem import Problem
from pipeloom.schedule import Schedule
from pipeloom.simulator import simulate
from pipeloom.timeline import Timeline, measured_costs
from pipeloom.wiring import Wiring

if TYPE_CHECKING:
    from pipeloom.checkpoints import load, save
    from pipeloom.drawing import draw
    from pipeloom.runtime import Part, Pipeline, Stage, reference
    from pipeloom.searcher import Found, search
    from pipeloom.splitter import fill, split

__version__ = "0.1.0"

__all__ = [
    "Action",
    "Costs",
    "Found",
    "Kind",
    "Part",
    "Pipeline",
    "PipeloomError",
    "Problem",
    "Schedule",
    "ScheduleError",
    "Stage",
    "Timeline",
    "Wiring",
    "check",
    "draw",
    "fill",
    "forward_only",
    "load",
    "lower",
    "measured_costs",
    "reference",
    "save",
    "schedules",
    "search",
    "simulate",
    "split",
]

_ON_FIRST_USE = {
    "Found": "pipeloom.searcher",
    "draw": "pipeloom.drawing",
    "search": "pipeloom.searcher",
    "Part": "pipeloom.runtime",
    "Pipeline": "pipeloom.runtime",
    "Stage": "pipeloom.runtime",
    "reference": "pipeloom.runtime",
    "fill": "pipeloom.splitter",
    "load": "pipeloom.checkpoints",
    "save": "pipeloom.checkpoints",
    "split": "pipeloom.splitter",
}


def __getattr__(name: str) -> object:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'pipeloom' has no attribute '{name}'")
    try:
        value = getattr(import_module(_ON_FIRST_USE[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"pipeloom.{name} needs PyTorch, which is not installed here: pip install torch") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE})
