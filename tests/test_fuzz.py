"""Whatever is thrown at it: an answer, or a refusal in words. `PIPELOOM_FUZZ=10000` throws more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMES = os.environ.get("PIPELOOM_FUZZ", "300")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["texts", "costs", "commands"])
def test_damaged_input_is_answered_or_refused(kind: str) -> None:
    program = Path(__file__).parent / "fuzz.py"
    ran = subprocess.run(
        [sys.executable, program, kind, "--times", TIMES], capture_output=True, text=True, timeout=3500
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
