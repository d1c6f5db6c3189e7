"""Pictures of timelines."""

from pipeloom.drawing._table import table

__all__ = ["table"]
