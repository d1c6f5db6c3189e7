"""Schedules by name: one file a schedule, a pure function from sizes to rows."""

from pipeloom.schedules._recipe import Recipe
from pipeloom.schedules._registry import RECIPES, find, make, names

__all__ = ["RECIPES", "Recipe", "find", "make", "names"]
