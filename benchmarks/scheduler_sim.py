"""What each knob of the scheduler does to throughput and latency, in virtual time.

    python benchmarks/scheduler_sim.py [KNOB ...] [--preset gpu|cpu] [--requests N] [--plot FOLDER]

The scheduler and the block pool are the real ones; a step takes as long as a formula says. Without
knobs named, all are tried, one at a time, the others at their defaults. `--set max_num_seqs=64`
changes what the others are, `--traffic rate=12 urgent=0.1` what arrives. Columns: generated tokens
per second; time to first token and inter-token latency, p50 / p99, in milliseconds; the longest
any request waited until something of it was computed, and the longest pause between two tokens of
one answer, in seconds; preemptions; sequences that found a cached prefix.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
from sim_engine import Result, Settings, StepCost, simulate
from sim_traffic import Traffic

from mistralrs_sdk.engine.prompt_batch import CPU_MIXED_PROMPT_TOKENS


@attrs.frozen(kw_only=True)
class Preset:
    """A machine with a model, and traffic that keeps it busy."""

    cost: StepCost
    settings: Settings = attrs.field(factory=Settings)
    traffic: Traffic = attrs.field(factory=Traffic)


PRESETS = {
    # Assumed, not measured: about what an 8B model in bfloat16 needs on a large GPU.
    "gpu": Preset(
        cost=StepCost(step=8e-3, prompt_token=40e-6, decode=20e-6, context_token=50e-9),
        traffic=Traffic(rate=8.0),
    ),
    # Fitted by step_cost.py: the demo model (135M, Q4_1) on two cores.
    "cpu": Preset(
        cost=StepCost(step=2.5e-3, prompt_token=0.58e-3, decode=0.66e-3, context_token=0.47e-6),
        settings=Settings(
            max_prefill_chunk_tokens=None,  # does not apply on a CPU
            max_mixed_prompt_tokens=CPU_MIXED_PROMPT_TOKENS,
        ),
        traffic=Traffic(
            requests=1000, rate=4.0, prompt_tokens=60, output_tokens=60, system_tokens=200
        ),
    ),
}

KNOBS: dict[str, tuple[Any, ...]] = {
    "max_num_seqs": (4, 8, 16, 32, 64, 128),
    "max_num_batched_tokens": (64, 128, 256, 512, 1024, 4096),
    "max_prefill_chunk_tokens": (64, 128, 256, 512, 1024, 2048, 4096),
    "max_decode_steps_before_prefill": (1, 2, 4, 8, 16, 32),
    "kv_tokens": (4096, 8192, 16_384, 32_768, 65_536, 131_072),
    "prefix_caching": (False, True),
    "mixed_batches": (False, True),
}

WITH_AND_WITHOUT_MIXING = {"max_prefill_chunk_tokens", "max_decode_steps_before_prefill"}
"""Knobs that mean something else when decodes do not ride along: shown both ways."""

LABELS = {"kv_tokens": "tokens the KV cache holds", "prefix_caching": "prefix caching"}

HEAD = (
    f"{'':>24} {'tok/s':>7} {'TTFT p50':>9} {'p99':>9} {'ITL p50':>8} {'p99':>8} "
    f"{'wait s':>8} {'pause s':>8} {'preempt':>7} {'hits':>5}"
)


def row(name: str, result: Result) -> str:
    """One line of the table."""
    first, between = result.first_token, result.inter_token
    return (
        f"{name:>24} {result.output_rate:7.0f} {1e3 * first.percentile(50):9.0f} "
        f"{1e3 * first.percentile(99):9.0f} {1e3 * between.percentile(50):8.1f} "
        f"{1e3 * between.percentile(99):8.1f} {result.wait.largest:8.1f} "
        f"{between.largest:8.2f} {result.preemptions:7d} {result.prefix_hit_rate:5.0%}"
    )


def sweep(knob: str, preset: Preset, *, seed: int) -> dict[str, list[tuple[Any, Result]]]:
    """Try every value of a knob; one series, or two where mixing makes a difference."""
    series = {"": preset.settings}
    if knob in WITH_AND_WITHOUT_MIXING:
        series = {
            "mixed": attrs.evolve(preset.settings, mixed_batches=True),
            "pure": attrs.evolve(preset.settings, mixed_batches=False),
        }
    found: dict[str, list[tuple[Any, Result]]] = {}
    for name, settings in series.items():
        print(f"\n{knob}{name and ', '}{name and f'{name} batches'}\n{HEAD}")
        found[name] = []
        for value in KNOBS[knob]:
            changed = attrs.evolve(settings, **{knob: value})
            result = simulate(changed, preset.cost, preset.traffic, seed=seed)
            print(row(str(value), result), flush=True)
            if preset.traffic.urgent:
                p50, p99 = (result.urgent_first_token.percentile(p) for p in (50, 99))
                print(f"{'urgent ones':>24} {'':7} {1e3 * p50:9.0f} {1e3 * p99:9.0f}")
            found[name].append((value, result))
    return found


def plot(knob: str, found: dict[str, list[tuple[Any, Result]]], path: Path) -> None:
    """Draw the three figures that matter, one beside the other, into a PNG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from PIL import Image

    mpl.rcParams.update({"font.size": 8, "axes.grid": True, "grid.alpha": 0.3})
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    rate, first, between = figure.subplots(1, 3)
    for color, (name, results) in zip(("C0", "C1"), found.items(), strict=False):
        places = range(len(results))
        suffix = name and f" ({name})"
        rate.plot(places, [r.output_rate for _, r in results], "o-", color=color, ms=4, label=name)
        for axes, pick in ((first, "first_token"), (between, "inter_token")):
            for percent, style in ((50, "o-"), (99, "s--"), (100, "^:")):
                if percent == 100 and pick == "first_token":
                    continue
                values = [1e3 * getattr(r, pick).percentile(percent) for _, r in results]
                label = f"p{percent}{suffix}" if percent < 100 else f"longest{suffix}"
                axes.plot(places, values, style, color=color, ms=3, lw=1, label=label)
    values = [value for value, _ in next(iter(found.values()))]
    names = [f"{value // 1024}k" if knob == "kv_tokens" else str(value) for value in values]
    for axes, title in (
        (rate, "generated tokens per second"),
        (first, "time to first token, ms"),
        (between, "inter-token latency, ms"),
    ):
        axes.set_title(title, fontsize=8)
        axes.set_xticks(range(len(names)), names)
        axes.set_xlabel(LABELS.get(knob, knob))
    rate.set_ylim(0, 1.1 * max(r.output_rate for results in found.values() for _, r in results))
    for axes in (first, between):
        drawn = [value for line in axes.lines for value in line.get_ydata()]
        if max(drawn) < 10 * min(drawn):
            axes.set_ylim(0, 1.1 * max(drawn))
            continue
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    for axes in (first, between, *([rate] if len(found) > 1 else [])):
        axes.legend(fontsize=6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    Image.open(path).quantize(32).save(path, optimize=True)  # a fifth of the bytes


def changed(value: Any, changes: Iterable[str]) -> Any:
    """`value` with fields set from texts such as "rate=12".

    Raises:
        SystemExit: there is no such field.
    """
    fields = attrs.fields_dict(type(value))
    for change in changes:
        name, _, text = change.partition("=")
        if name not in fields or not text:
            raise SystemExit(f"{change!r}: write NAME=VALUE with one of {', '.join(fields)}")
        parsed = {"True": True, "False": False, "None": None}.get(text, text)
        if isinstance(parsed, str):
            parsed = float(text) if "float" in str(fields[name].type) else int(text)
        value = attrs.evolve(value, **{name: parsed})
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("knobs", nargs="*", metavar="KNOB", help=", ".join(KNOBS))
    parser.add_argument("--preset", choices=PRESETS, default="gpu")
    parser.add_argument("--requests", type=int, help="how many arrive")
    parser.add_argument("--set", nargs="+", default=[], metavar="KNOB=VALUE")
    parser.add_argument("--traffic", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write a PNG per knob")
    parser.add_argument("--once", action="store_true", help="no knob is changed: one run")
    args = parser.parse_args()
    if unknown := set(args.knobs) - set(KNOBS):
        parser.error(f"unknown knobs {sorted(unknown)}: there are {', '.join(KNOBS)}")
    preset = PRESETS[args.preset]
    traffic = changed(preset.traffic, args.traffic)
    if args.requests is not None:
        traffic = attrs.evolve(traffic, requests=args.requests)
    preset = attrs.evolve(preset, settings=changed(preset.settings, args.set), traffic=traffic)
    print(f"{args.preset}: {preset.cost}\n{preset.settings}\n{preset.traffic}")
    if args.once:
        result = simulate(preset.settings, preset.cost, preset.traffic, seed=args.seed)
        print(f"{HEAD}\n{row('', result)}")
        print(
            f"{result.answered} answered, {result.canceled} canceled, {result.rejected} rejected "
            f"in {result.seconds:.0f} virtual seconds; {result.passes} passes took "
            f"{result.wall_seconds:.1f} s, {1e6 * result.wall_seconds / result.passes:.0f} us each"
        )
        return
    for knob in args.knobs or KNOBS:
        found = sweep(knob, preset, seed=args.seed)
        if args.plot:
            plot(knob, found, args.plot / f"{args.preset}_{knob}.png")


if __name__ == "__main__":
    main()
