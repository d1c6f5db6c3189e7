"""Prices a schedule: schedule and costs in, timeline out."""

from pipeloom.simulator._simulate import Receives, simulate

__all__ = ["Receives", "simulate"]
