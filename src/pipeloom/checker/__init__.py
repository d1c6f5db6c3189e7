"""The checker: everything that is wrong with a schedule."""

from pipeloom.checker._check import check

__all__ = ["check"]
