"""Sequences in pieces: a schedule of them can be known in every way, and not be run yet."""

from __future__ import annotations

from pipeloom.errors import PipelineError
from pipeloom.schedule import Schedule


def refuse_pieces(schedule: Schedule) -> None:
    """Refuse a schedule that cuts sequences into pieces.

    Raises:
        PipelineError: it does.
    """
    if schedule.wiring.pieces > 1:
        raise PipelineError(
            f"{schedule.name} cannot be run yet: it cuts sequences into {schedule.wiring.pieces} pieces, and a stage "
            "keeps no keys and values from piece to piece. It can be checked, simulated and drawn; DualPipeV, "
            "ZBVZeroBubble, Interleaved1F1B and 1F1B run"
        )
