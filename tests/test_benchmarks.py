"""The soak starts and finds nothing wrong; its real length is for a quiet machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[1] / "benchmarks" / "soak.py"


@pytest.mark.parametrize("mode", [(), ("--packed",)], ids=["exact", "packed"])
def test_a_short_soak_finds_nothing_wrong(mode):
    """Random traffic and cancels for a second give right texts and leave nothing behind."""
    done = subprocess.run(
        [sys.executable, SOAK, "--minutes", "0.02", "--cases", "8", *mode],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\n0 wrong\n")
