"""Schedules x cases on this machine: each cell equals one process, or is refused with a reason."""

from pipeloom.selftest.case import Case
from pipeloom.selftest.cases import CASES
from pipeloom.selftest.running import Outcome, run
from pipeloom.selftest.table import as_json, table

__all__ = ["CASES", "Case", "Outcome", "as_json", "run", "table"]
