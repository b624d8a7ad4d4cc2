"""Pinning in real threads: what is logged, what is refused, and who runs where."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from mistralrs_sdk import ConfigError
from mistralrs_sdk.cpu_threads import use_threads
from tests.checkpoint_files import write_folder

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="threads cannot be pinned here"
)


@needs_affinity
def test_a_refused_pin_names_who_asked_for_it(monkeypatch):
    """A sandbox may forbid it; the user who asked must learn of it."""

    def refuse(pid, cpus):
        raise PermissionError("Operation not permitted")

    monkeypatch.setenv("CANDLE_CPU_MASK", str(min(os.sched_getaffinity(0))))
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with pytest.raises(ConfigError, match=r"CANDLE_CPU_MASK.*not permitted"):
        use_threads(None)


def test_the_warnings_of_the_choice_are_logged(monkeypatch, caplog):
    """Once each, on the engine's logger."""
    monkeypatch.delenv("CANDLE_CPU_MASK", raising=False)
    with caplog.at_level(logging.WARNING, logger="mistralrs_sdk.engine"):
        assert use_threads(1000).num_threads == 1000
    assert caplog.text.count("num_threads (1000) is more than") == 1


PINNED = """
import asyncio, json, os, sys, threading
import torch
from mistralrs_sdk import ModelBuilder

def allowed_of_all_threads():
    found = {}
    for task in os.listdir("/proc/self/task"):
        try:
            found[int(task)] = sorted(os.sched_getaffinity(int(task)))
        except ProcessLookupError:
            pass
    return found

def compute(engine):
    torch.ones(1 << 21).exp()
    torch.ones(256, 256) @ torch.ones(256, 256)
    return allowed_of_all_threads()

async def main():
    async with await ModelBuilder(sys.argv[1]).with_force_cpu().build() as model:
        after = await model.inner().thread.call(compute)
        engine = next(t for t in threading.enumerate() if t.name == "mistralrs-engine")
        print(json.dumps({
            "main": after.pop(threading.get_native_id()),
            "engine": after.pop(engine.native_id),
            "others": list(after.values()),
            "describe": model.describe(),
        }))

asyncio.run(main())
"""


@needs_affinity
def test_the_mask_holds_for_the_engine_and_its_workers_and_for_nothing_else(tmp_path):
    """The engine's thread and its OpenMP threads run on the mask; the user's thread is free."""
    everywhere = sorted(os.sched_getaffinity(0))
    if len(everywhere) < 2:
        pytest.skip("with one CPU, pinning changes nothing")
    folder = write_folder(tmp_path / "model")
    environ = {
        "CANDLE_CPU_MASK": str(everywhere[0]),
        "CANDLE_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", PINNED, str(folder)],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=True,
    )
    seen = json.loads(result.stdout)
    assert seen["engine"] == everywhere[:1]
    assert seen["main"] == everywhere
    assert everywhere[:1] in seen["others"]
    assert all(cpus in (everywhere, everywhere[:1]) for cpus in seen["others"])
    rows = {line.split("  ")[0]: line.split() for line in seen["describe"].splitlines()}
    assert rows["num_threads"][1:] == ["2", "CANDLE_NUM_THREADS"]
    assert rows["cpu affinity"][2:] == [str(everywhere[0]), "CANDLE_CPU_MASK"]
