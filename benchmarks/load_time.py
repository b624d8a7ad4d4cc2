"""How long it takes from a model's path to its first token, imports not counted, and what RAM.

    python benchmarks/load_time.py [MODEL] [--runs 5] [--peers]

Every run is a fresh process, and the file is in the page cache. With --peers, transformers does the
same in turn (`from_pretrained(..., gguf_file=...)`), which needs accelerate and gguf. CPU seconds
are those of all threads.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mistralrs_sdk.cli.model_flags import model_place
from mistralrs_sdk.machine import default_num_threads, read_text

QUESTION = "What is the capital of France?"


def first_token(path: str, threads: int) -> dict[str, float]:
    """Load with this package and wait for the first text; returns what it took."""
    import mistralrs_sdk.handle.model  # noqa: F401 (so that its imports are not counted)
    from mistralrs_sdk import ModelBuilder

    async def ask(passed: Callable[[], dict[str, float]]) -> dict[str, float]:
        builder = ModelBuilder(path).with_num_threads(threads).with_force_cpu()
        async with await builder.build() as model:
            loaded = passed()
            async with await model.stream_chat_request(QUESTION) as stream:
                await anext(stream)
            return {"load_wall": loaded["wall"], "load_cpu": loaded["cpu"], **passed()}

    return asyncio.run(ask(stopwatch()))


def first_token_by_transformers(path: str, threads: int) -> dict[str, float]:
    """The same by transformers."""
    import accelerate  # noqa: F401 (as above)
    import gguf  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401

    torch.set_num_threads(threads)
    passed = stopwatch()
    place = peer_place(path)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model = AutoModelForCausalLM.from_pretrained(**place)
    loaded = passed()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    model.generate(**inputs, max_new_tokens=1, do_sample=False)
    return {"load_wall": loaded["wall"], "load_cpu": loaded["cpu"], **passed()}


def peer_place(path: str) -> dict[str, str]:
    """What `from_pretrained` takes for a folder or a GGUF file."""
    if not path.endswith(".gguf"):
        return {"pretrained_model_name_or_path": path}
    return {"pretrained_model_name_or_path": str(Path(path).parent), "gguf_file": Path(path).name}


def stopwatch() -> Callable[[], dict[str, float]]:
    """Start measuring; the function returned tells what has passed, and the memory now."""
    wall, cpu = time.perf_counter(), time.process_time()

    def passed() -> dict[str, float]:
        return {
            "wall": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
            **memory_mib(),
        }

    return passed


def memory_mib() -> dict[str, float]:
    """Resident memory now and at its highest; macOS tells only the highest, so both are that."""
    found = {}
    for line in (read_text("/proc/self/status") or "").splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            found[name] = int(value.split()[0]) / 1024
    if not found:  # macOS counts bytes
        found["VmRSS"] = found["VmHWM"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"rss": found["VmRSS"], "peak_rss": found["VmHWM"]}


LOADERS = {"mistralrs_sdk": first_token, "transformers": first_token_by_transformers}


def measure(who: str, path: str, threads: int) -> dict[str, float]:
    """Run one loader in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, path, "--measure", who, "--threads", str(threads)],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{who} failed to load {path}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def can_load(who: str) -> bool:
    needs = ("accelerate", "gguf") if who == "transformers" else ()
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{who} is left out: pip install {' '.join(missing)}")
    return not missing


def report(results: dict[str, list[dict[str, float]]]) -> None:
    """Print medians with their range, and the ratio to the peer."""
    medians: dict[str, dict[str, Any]] = {}
    for who, runs in results.items():
        columns = {key: [run[key] for run in runs] for key in runs[0]}
        middle = medians[who] = {key: statistics.median(v) for key, v in columns.items()}
        print(
            f"{who:14} to the first token: {middle['cpu']:6.2f} CPU s "
            f"({min(columns['cpu']):.2f} to {max(columns['cpu']):.2f}), {middle['wall']:6.2f} s; "
            f"of that loading: {middle['load_cpu']:6.2f} CPU s, {middle['load_wall']:6.2f} s; "
            f"RSS {middle['rss']:.0f} MiB, at most {middle['peak_rss']:.0f} MiB"
        )
    if len(medians) == 2:
        ours, theirs = medians.values()
        shown = {"cpu": "CPU seconds", "wall": "seconds", "rss": "RSS", "peak_rss": "highest RSS"}
        ratios = [f"{ours[key] / theirs[key]:.3f} of its {text}" for key, text in shown.items()]
        print(f"mistralrs_sdk needs {', '.join(ratios)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="demo", help="GGUF file, folder or demo")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="measure transformers too")
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--measure", choices=LOADERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    path = model_place(args.model)
    if args.measure:
        print(json.dumps(LOADERS[args.measure](path, args.threads)))
        return
    if Path(path).is_file():
        Path(path).read_bytes()  # into the page cache, for the first run as for the others
    who = ["mistralrs_sdk", *(["transformers"] if args.peers and can_load("transformers") else [])]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in who}
    for _ in range(args.runs):
        for name in who:
            results[name].append(measure(name, path, args.threads))
    print(f"{path}: medians of {args.runs} runs, {args.threads} threads")
    report(results)


if __name__ == "__main__":
    main()
