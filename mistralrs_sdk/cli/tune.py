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

from mistralrs_sdk import ConfigError, ModelBuilder, ModelLoadError, UnsupportedError, __version__
from mistralrs_sdk.cli.model_flags import add_model_flags, builder_from
from mistralrs_sdk.cli.tune_estimate import (
    BITS,
    Candidate,
    Machine,
    estimate,
    measure,
    quality_of,
    recommend,
)

_MAX_SEQS = 32
_CHOSEN_HERE = {"with_isq": "--isq", "with_topology_from_path": "--topology"}
_WIDTH = 160
"""Of a table that goes to a file or a pipe."""


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the program."""
    parser = commands.add_parser(
        "tune",
        help="choose how to keep a model's weights on this machine",
        description="Work out for several weight types what a model takes in memory, measure this "
        "machine for a second, and say what to expect. The speeds are estimates: bench measures.",
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
    candidates, machine = asyncio.run(_candidates(builder_from(args), args.with_num_threads))
    best = recommend(candidates, args.profile)
    assert best is not None, "where nothing fits, an error said so"
    command = shlex.join(["mistralrs-sdk", "serve", *_flags(args, best)])
    if args.emit_config is not None:
        _write(args.emit_config, _config(args, best))
    if args.json:
        print(_as_json(args, candidates, machine, best=best, command=command))
    else:
        _print(args, candidates, machine, best=best, command=command)
    return 0


async def _candidates(
    builder: ModelBuilder, num_threads: int | None
) -> tuple[list[Candidate], Machine]:
    """Every candidate, and the machine as it was measured for them.

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
    machine = measure(first.device, first.dtype, num_threads=num_threads)
    return [_estimated(found, machine) for found in candidates], machine


def _estimated(candidate: Candidate, machine: Machine) -> Candidate:
    if candidate.plan is None:
        return candidate
    decode, prefill = estimate(candidate.plan, machine)
    return attrs.evolve(
        candidate, decode_tokens_per_second=decode, prefill_tokens_per_second=prefill
    )


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
    machine: Machine,
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
            "decode_tokens_per_second": found.decode_tokens_per_second,
            "prefill_tokens_per_second": found.prefill_tokens_per_second,
        }
        for found in candidates
    ]
    document = {
        "version": __version__,
        "model": args.model_id,
        "profile": args.profile,
        "machine": attrs.asdict(machine),
        "candidates": entries,
        "recommended": None if best.bits is None else str(best.bits),
        "command": command,
    }
    return json.dumps(document, indent=2)


def _print(
    args: argparse.Namespace,
    candidates: Sequence[Candidate],
    machine: Machine,
    *,
    best: Candidate,
    command: str,
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "Quality", "Weights", title=args.model_id, title_justify="left")
    for name in ("MiB", "Context", "KV tokens", "Decode T/s", "Prefill T/s ≥"):
        table.add_column(name, justify="right")
    for found in candidates:
        name = f"{found.name} *" if found is best else found.name
        if found.plan is None:
            table.add_row(name, found.quality, "does not fit", *["-"] * 5)
            continue
        table.add_row(
            name,
            found.quality,
            found.plan.weights,
            f"{found.plan.weight_bytes / 2**20:.0f}",
            str(found.plan.max_model_len),
            str(found.plan.num_tokens),
            f"{found.decode_tokens_per_second:.0f}",
            f"{found.prefill_tokens_per_second:.0f}",
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(table)
    plan = best.plan
    assert plan is not None, "what is recommended fits"
    print(
        f"This machine reads {machine.bytes_per_second / 1e9:.0f} GB/s and multiplies "
        f"{machine.operations_per_second / 1e9:.0f} GFLOP/s in {plan.dtype} on {plan.device}. "
        "Speeds are estimates for one request at a time, of a prompt at least."
    )
    for found in candidates:
        if found.reason is not None:
            print(f"{found.name}: {' '.join(found.reason.split())}")
    if best.quality == "degraded":
        print(
            "Nothing better fits: expect answers to suffer; a smaller model may serve you better."
        )
    print(f"Recommended ({args.profile}): {best.name}\n  {command}")
