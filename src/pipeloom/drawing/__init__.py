"""Pictures of schedules."""

from pipeloom.drawing._table import Table

__all__ = ["Table"]
