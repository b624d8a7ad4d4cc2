"""Does a model decode as fast as `tune` expected of a slice of it?

    python benchmarks/tune.py [NAME ...] [--bits 0 8 4] [--rounds 2]

For the demo model and for random checkpoints of other shapes (`SHAPES`), each kept as stored (0)
and quantised to numbers of bits: what `tune` says in a process of its own, then what `bench`
measures of the whole model, and so again for each round. Medians of the rounds, and the quotient.
"8 at once" is 8 divided by the median time between two tokens of a request beside seven others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from throughput import GIB, measure_machine

from mistralrs_sdk import ModelBuilder
from mistralrs_sdk.cli.bench_runs import run_load, run_single
from mistralrs_sdk.cli.bench_targets import InProcess
from mistralrs_sdk.cli.bench_work import Load, make_jobs
from mistralrs_sdk.cli.model_flags import model_place

SHAPES: dict[str, dict[str, int]] = {
    "8 layers of 1024": {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 2816},
    "4 layers of 2048, grouped": {
        "num_hidden_layers": 4,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_key_value_heads": 4,
    },
    "wide vocabulary": {
        "num_hidden_layers": 6,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "vocab_size": 151_936,
    },
    "24 thin layers": {"num_hidden_layers": 24, "hidden_size": 512, "intermediate_size": 1536},
}
"""What differs from a Llama with heads of 64 and 32000 tokens, whose embedding is its head."""

CLIENTS = 8
WHAT = ("decode", "8 at once", "prefill")
Rates = dict[str, float]
"""Tokens a second of each of `WHAT`."""


def main() -> None:
    parser = argparse.ArgumentParser()
    names = ("demo", *SHAPES)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--bits", nargs="+", type=int, default=[0, 8, 4], help="0: as stored")
    parser.add_argument("--rounds", type=int, default=2, help="tune, then bench, and so again")
    args = parser.parse_args()
    print("model, weights: tokens a second expected / measured (least to most) = quotient")
    for name in args.names or names:
        with tempfile.TemporaryDirectory() as folder:
            model = "demo" if name == "demo" else write_checkpoint(Path(folder), SHAPES[name])
            compare(name, model, bits=args.bits, rounds=args.rounds)
    machine = measure_machine()
    print(f"This machine reads {machine.read_bandwidth / GIB:.1f} GiB/s at most.")


def compare(name: str, model: str, *, bits: list[int], rounds: int) -> None:
    """Print a row for each way to keep the weights."""
    expected: dict[int, list[Rates]] = {b: [] for b in bits}
    measured: dict[int, list[Rates]] = {b: [] for b in bits}
    seconds = []
    for _ in range(rounds):
        told = tune(model)
        seconds.append(told["measured_seconds"])
        by_bits = {int(entry["isq"] or 0): entry for entry in told["candidates"]}
        for b in bits:
            expected[b].append(expected_rates(by_bits[b]))
            measured[b].append(asyncio.run(bench(model, b)))
    for b in bits:
        row = [f"{name}, {f'{b} bits' if b else 'as stored'}:"]
        for what in WHAT:
            thought, found = ([rates[what] for rates in of[b]] for of in (expected, measured))
            middle, right = statistics.median(thought), statistics.median(found)
            spread = f"({min(found):.0f} to {max(found):.0f})"
            row.append(f"{what} {middle:.0f} / {right:.0f} {spread} = {middle / right:.2f}")
        print("   ".join(row), flush=True)
    print(f"{name}: tune measured for {max(seconds):.1f} s at most", flush=True)


def expected_rates(candidate: dict[str, Any]) -> Rates:
    """Of an entry of what `tune --json` prints."""
    together = candidate["decode_tokens_per_second_at_once"][str(CLIENTS)]
    alone, prompt = (candidate[f"{what}_tokens_per_second"] for what in ("decode", "prefill"))
    return dict(zip(WHAT, (alone, together, prompt), strict=True))


def tune(model: str) -> dict[str, Any]:
    """What the command finds, in a process of its own."""
    code = "import sys; from mistralrs_sdk.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "tune", "-m", model, "--json"], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


async def bench(model: str, bits: int) -> Rates:
    """What `bench` measures by itself, and with so many clients."""
    builder = ModelBuilder(model_place(model)).with_max_num_seqs(CLIENTS).with_prefix_cache_n(0)
    if bits:
        builder = builder.with_auto_isq(bits)
    async with await builder.with_progress(False).build() as built:
        target = await InProcess.of(built, name=model)
        prompt, decode = await run_single(target, [(512, 1), (4, 128)], iterations=3, warmup=1)
        jobs, warm = (
            make_jobs([(8, 64)] * count, target.ids, seed=seed)
            for seed, count in enumerate((2 * CLIENTS, CLIENTS))
        )
        load = await run_load(target, Load(concurrency=CLIENTS), jobs, warmup=warm)
    together = 1000 * CLIENTS / load.itl_ms.p50
    rates = (decode.tokens_per_second, together, prompt.tokens_per_second)
    return dict(zip(WHAT, rates, strict=True))


def write_checkpoint(folder: Path, differs: dict[str, int]) -> str:
    """A Llama with random weights in float16."""
    hidden = differs["hidden_size"]
    heads = hidden // 64
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32_000,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **differs,
    }
    (folder / "config.json").write_text(json.dumps(config))
    kv, wide = config["num_key_value_heads"] * 64, config["intermediate_size"]
    shapes = {
        **{f"self_attn.{name}_proj": (hidden, hidden) for name in "qo"},
        **{f"self_attn.{name}_proj": (kv, hidden) for name in "kv"},
        **{f"mlp.{name}_proj": (wide, hidden) for name in ("gate", "up")},
        "mlp.down_proj": (hidden, wide),
    }
    random = torch.Generator().manual_seed(0)

    def drawn(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random) * columns**-0.5).half()

    tensors = {"model.norm.weight": torch.ones(hidden).half()}
    tensors["model.embed_tokens.weight"] = drawn(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden).half()
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = drawn(*shape)
    save_file(tensors, folder / "model.safetensors")
    words = {f"w{i}": i for i in range(config["vocab_size"])}
    words = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": words}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


if __name__ == "__main__":
    main()
