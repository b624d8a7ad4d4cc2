"""`mistralrs-sdk tune`: how to keep a model's weights on this machine, and what to expect."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from mistralrs_sdk import (
    ConfigError,
    LayerTopology,
    MemoryPlan,
    ModelBuilder,
    ModelLoadError,
    Topology,
    UnsupportedError,
    __version__,
)
from mistralrs_sdk.cli.model_flags import add_model_flags, builder_from
from mistralrs_sdk.cli.tune_estimate import BITS, Candidate, estimate, quality_of, recommend
from mistralrs_sdk.cli.tune_probe import REQUESTS, Probe, Sizes, main_type, measure

_MAX_SEQS = 32
_CHOSEN_HERE = {"with_isq": "--isq", "with_topology_from_path": "--topology"}
_WIDTH = 160
"""Of a table that goes to a file or a pipe."""
_MEASURED_BITS = (None, 8, 4)
"""Whose types are measured; the others lie between."""


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the program."""
    parser = commands.add_parser(
        "tune",
        help="choose how to keep a model's weights on this machine",
        description="Work out for several weight types what a model takes in memory, measure for "
        "some seconds what layers like its do here, and say what to expect. The speeds are "
        "estimates: bench measures.",
    )
    add_model_flags(parser, max_seqs=_MAX_SEQS)
    parser.add_argument(
        "--profile",
        choices=("quality", "balanced", "fast"),
        default="balanced",
        help="how much quality may be given for speed (balanced)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--emit-config", type=Path, metavar="FILE", help="write it for serve --config"
    )
    parser.set_defaults(command=tune)


def tune(args: argparse.Namespace) -> int:
    """Print candidates and a recommendation."""
    for name, flag in _CHOSEN_HERE.items():
        if getattr(args, name) is not None:
            raise ConfigError(f"{flag} is what tune chooses: leave it out")
    candidates, probes = asyncio.run(_candidates(builder_from(args), args))
    best = recommend(candidates, args.profile)
    assert best is not None, "where nothing fits, an error said so"
    command = shlex.join(["mistralrs-sdk", "serve", *_flags(args, best)])
    if args.emit_config is not None:
        _write(args.emit_config, _config(args, best))
    if args.json:
        print(_as_json(args, candidates, probes, best=best, command=command))
    else:
        _print(args, candidates, probes, best=best, command=command)
    return 0


async def _candidates(
    builder: ModelBuilder, args: argparse.Namespace
) -> tuple[list[Candidate], list[Probe]]:
    """Every candidate, and what was measured for them.

    Raises:
        ModelLoadError, UnsupportedError: the model cannot be had, or fits in no way.
    """
    candidates: list[Candidate] = []
    failure: ModelLoadError | None = None
    for bits in (None, *BITS):
        asked = builder if bits is None else builder.with_auto_isq(bits)
        try:
            plan = await asked.plan()
        except ModelLoadError as error:
            failure = failure or error
            if isinstance(error, UnsupportedError) and bits is None:
                raise  # of no type will it be any better
            candidates.append(Candidate(bits=bits, quality=quality_of(bits), reason=str(error)))
        else:
            candidates.append(Candidate(bits=bits, quality=quality_of(bits), plan=plan))
    first = next((found.plan for found in candidates if found.plan is not None), None)
    if first is None:
        assert failure is not None, "one of the two is there"
        raise failure
    sizes = Sizes.of(first, await _values_in_layers(builder, first))
    measured = [found.plan for found in candidates if found.bits in _MEASURED_BITS and found.plan]
    probes = await measure(
        sizes,
        list(dict.fromkeys(main_type(plan) for plan in measured or [first])),
        device=first.device,
        dtype=args.with_dtype,
        num_threads=args.with_num_threads,
    )
    estimated = [
        found
        if found.plan is None
        else attrs.evolve(found, speeds=estimate(found.plan, sizes, probes))
        for found in candidates
    ]
    return estimated, probes


async def _values_in_layers(builder: ModelBuilder, plan: MemoryPlan) -> int:
    """How many values the matrices in layers have: what they save from one type to another."""
    q4_in_layers = Topology.empty().with_pattern(r"layers\.", LayerTopology(isq="q4_0"))
    wide = builder.with_isq("q8_0")
    try:
        larger = await wide.plan()
        smaller = await wide.with_topology(q4_in_layers).plan()
    except (ConfigError, ModelLoadError):
        return plan.num_parameters  # such a model is quantised in no way, or only smaller ones fit
    return min(2 * (larger.weight_bytes - smaller.weight_bytes), plan.num_parameters)


def _chosen_flags(args: argparse.Namespace, best: Candidate) -> dict[str, Any]:
    """The flags of `serve`, without dashes before them: those that were given, and the choice."""
    parser = argparse.ArgumentParser(add_help=False)
    add_model_flags(parser, max_seqs=_MAX_SEQS)
    unset = vars(parser.parse_args(["-m", args.model_id]))
    chosen: dict[str, Any] = {"model-id": args.model_id}
    for action in parser._actions:  # argparse has no public way to list what a parser takes
        value = getattr(args, action.dest)
        if value != unset[action.dest]:
            names = [name[2:] for name in action.option_strings if name.startswith("--")]
            chosen[names[0]] = value
    if best.bits is not None:
        chosen["isq"] = str(best.bits)
    return chosen


def _flags(args: argparse.Namespace, best: Candidate) -> list[str]:
    words: list[str] = []
    for name, value in _chosen_flags(args, best).items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        for one in value if isinstance(value, list) else [value]:
            words += ["-m" if name == "model-id" else f"--{name}", str(one)]
    return words


def _config(args: argparse.Namespace, best: Candidate) -> str:
    """The same as TOML: JSON's strings, numbers, truth values and lists are TOML's too."""
    lines = ["# made by mistralrs-sdk tune; the keys are the flags of mistralrs-sdk serve"]
    lines += [
        f"{name} = {json.dumps(value, ensure_ascii=False)}"
        for name, value in _chosen_flags(args, best).items()
    ]
    return "\n".join(lines) + "\n"


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--emit-config {file} cannot be written: {error}") from error


def _as_json(
    args: argparse.Namespace,
    candidates: Sequence[Candidate],
    probes: Sequence[Probe],
    *,
    best: Candidate,
    command: str,
) -> str:
    entries = [
        {
            "isq": None if found.bits is None else str(found.bits),
            "quality": found.quality,
            "fits": found.plan is not None,
            "reason": found.reason,
            "weights": found.plan and found.plan.weights,
            "weight_bytes": found.plan and found.plan.weight_bytes,
            "kv_bytes": found.plan and found.plan.kv_bytes,
            "kv_tokens": found.plan and found.plan.num_tokens,
            "context": found.plan and found.plan.max_model_len,
            "decode_tokens_per_second": dict(zip(REQUESTS, found.speeds.decode, strict=True)),
            "prefill_tokens_per_second": found.speeds.prefill,
        }
        for found in candidates
    ]
    document = {
        "version": __version__,
        "model": args.model_id,
        "profile": args.profile,
        "measured": [attrs.asdict(probe) for probe in probes],
        "candidates": entries,
        "recommended": None if best.bits is None else str(best.bits),
        "command": command,
    }
    return json.dumps(document, indent=2)


def _print(
    args: argparse.Namespace,
    candidates: Sequence[Candidate],
    probes: Sequence[Probe],
    *,
    best: Candidate,
    command: str,
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "Quality", "Weights", title=args.model_id, title_justify="left")
    rates = [f"Decode T/s, {n} at once" for n in REQUESTS]
    for name in ("MiB", "Context", "KV tokens", "Prefill T/s", *rates):
        table.add_column(name, justify="right")
    for found in candidates:
        name = f"{found.name} *" if found is best else found.name
        if found.plan is None:
            table.add_row(name, found.quality, "does not fit", *["-"] * (4 + len(REQUESTS)))
            continue
        table.add_row(
            name,
            found.quality,
            found.plan.weights,
            f"{found.plan.weight_bytes / 2**20:.0f}",
            str(found.plan.max_model_len),
            str(found.plan.num_tokens),
            f"{found.speeds.prefill:.0f}",
            *[f"{rate:.0f}" for rate in found.speeds.decode],
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(table)
    plan = best.plan
    assert plan is not None, "what is recommended fits"
    print(
        f"Speeds are estimates on {plan.device}, from layers like the model's that were measured in "
        f"{', '.join(probe.weights for probe in probes)}."
    )
    for found in candidates:
        if found.reason is not None:
            print(f"{found.name}: {' '.join(found.reason.split())}")
    if best.quality == "degraded":
        print(
            "Nothing better fits: expect answers to suffer; a smaller model may serve you better."
        )
    print(f"Recommended ({args.profile}): {best.name}\n  {command}")
