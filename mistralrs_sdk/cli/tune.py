"""`mistralrs-sdk tune`: how to keep a model's weights on this machine, and what to expect."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from mistralrs_sdk import ConfigError, MemoryPlan, ModelBuilder, ModelLoadError, UnsupportedError
from mistralrs_sdk.cli.model_flags import add_model_flags, builder_from, model_place
from mistralrs_sdk.cli.tune_estimate import BITS, Candidate, Findings, completed, recommend
from mistralrs_sdk.cli.tune_probe import Way, probe
from mistralrs_sdk.cli.tune_report import as_json, print_table
from mistralrs_sdk.cli.tune_shape import Shape, Types, num_bytes, read_shape

_MAX_SEQS = 32
_CHOSEN_HERE = {"with_isq": "--isq", "with_topology_from_path": "--topology"}
_SEVERAL_DEVICES = {
    "with_tensor_parallel": "--tensor-parallel",
    "with_device_mapping": "--device-layers",
}
_CHANGE_SPEED = (
    *("cpu", "with_dtype", "with_num_threads", "with_flashinfer", "with_cuda_graphs"),
    *("no_kv_cache", "paged_attn", "pa_block_size", "pa_cache_type"),
)
"""The flags that hold for what is measured, too."""
_MEASURED = (None, 8, 4, 5, 6, 3, 2)
"""In this order: if time runs out, what is left lies between or is not worth much."""


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the program."""
    parser = commands.add_parser(
        "tune",
        help="choose how to keep a model's weights on this machine",
        description="Work out for several weight types what a model takes in memory, measure for "
        "some seconds what a slice of it does on this machine, and say what to expect of the "
        "whole. The speeds are estimates: bench measures.",
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
    if sys.stderr.isatty():
        print("Slices of the model are measured, for ten seconds at most ...", file=sys.stderr)
    found = asyncio.run(_find(args))
    best = recommend(found.candidates, args.profile)
    assert best is not None, "where nothing fits, an error said so"
    command = shlex.join(["mistralrs-sdk", "serve", *_flags(args, best)])
    if args.emit_config is not None:
        _write(args.emit_config, _config(args, best))
    if args.json:
        print(as_json(found, best, model=args.model_id, profile=args.profile, command=command))
    else:
        print_table(found, best, model=args.model_id, profile=args.profile, command=command)
    return 0


async def _find(args: argparse.Namespace) -> Findings:
    """Every candidate with its plan, and the speeds that can be measured.

    Raises:
        ModelLoadError, UnsupportedError: the model cannot be had, or fits in no way.
    """
    candidates = await _planned(builder_from(args))
    first = next(found.plan for found in candidates if found.plan is not None)
    started = time.perf_counter()
    try:
        measured = await _measured(args, candidates, first)
    except ConfigError as error:
        return Findings(candidates=candidates, plan=first, unmeasured=str(error))
    seconds = time.perf_counter() - started
    return Findings(candidates=completed(measured), plan=first, seconds=seconds)


async def _planned(builder: ModelBuilder) -> list[Candidate]:
    candidates: list[Candidate] = []
    failure: ModelLoadError | None = None
    for bits in (None, *BITS):
        asked = builder if bits is None else builder.with_auto_isq(bits)
        try:
            candidates.append(Candidate(bits=bits, plan=await asked.plan()))
        except ModelLoadError as error:
            failure = failure or error
            if isinstance(error, UnsupportedError) and bits is None:
                raise  # of no type will it be any better
            candidates.append(Candidate(bits=bits, reason=str(error)))
    if all(found.plan is None for found in candidates):
        assert failure is not None, "one of the two is there"
        raise failure
    return candidates


async def _measured(
    args: argparse.Namespace, candidates: Sequence[Candidate], first: MemoryPlan
) -> list[Candidate]:
    """The candidates with what slices of the model took.

    Raises:
        ConfigError: nothing can be measured; the message says why.
    """
    for name, flag in _SEVERAL_DEVICES.items():
        if getattr(args, name) not in (None, 1):
            raise ConfigError(f"with {flag} bench measures the whole model, a slice says nothing")
    shape, stored = read_shape(_place(args), plan_weights=first.weights)
    fitting = sorted((c for c in candidates if c.plan is not None), key=_order)
    ways = [_way(candidate, shape, stored) for candidate in fitting]
    times = await probe(
        shape, ways, _settings_for(args), device=first.device, free_bytes=first.free_bytes
    )
    found = dict(zip((candidate.bits for candidate in fitting), times, strict=True))
    return [
        attrs.evolve(c, times=found.get(c.bits), measured=found.get(c.bits) is not None)
        for c in candidates
    ]


def _order(candidate: Candidate) -> int:
    """What is measured first: if time runs out, the others lie between."""
    return _MEASURED.index(candidate.bits)


def _way(candidate: Candidate, shape: Shape, stored: Types) -> Way:
    """How a slice is kept like a candidate: written so, where it is known how, else quantised."""
    assert candidate.plan is not None, "it fits"
    if candidate.bits is not None:
        types = Types.of_bits(shape, candidate.bits)
        if types.are_those_of(candidate.plan.weights, shape):
            return Way(types=types)
    kept = candidate.plan.weight_bytes / num_bytes(shape, stored)
    return Way(types=stored, bits=candidate.bits, kept=kept)


def _place(args: argparse.Namespace) -> Path:
    """The folder or file of a model that `plan()` has opened, in the hub's cache if it is there."""
    place = Path(model_place(args.model_id)).expanduser()
    if place.exists():
        return place
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                args.model_id,
                revision=args.with_hf_revision,
                cache_dir=args.from_hf_cache_path,
                local_files_only=True,
            )
        )
    except LocalEntryNotFoundError as error:
        raise ConfigError(f"{args.model_id} is no longer in the hub's cache: {error}") from error


def _settings_for(args: argparse.Namespace) -> Callable[[Path, Path], ModelBuilder]:
    """Makes builders for other files with those settings of the model that change its speed."""

    def builder(file: Path, tokenizer: Path) -> ModelBuilder:
        settings = _unset(str(file))
        for name in _CHANGE_SPEED:
            setattr(settings, name, getattr(args, name))
        return builder_from(settings).with_tokenizer_json(tokenizer)

    return builder


def _unset(model: str) -> argparse.Namespace:
    """The flags of a model when nobody sets them."""
    return _model_parser().parse_args([f"--model-id={model}"])


def _model_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add_model_flags(parser, max_seqs=_MAX_SEQS)
    return parser


def _chosen_flags(args: argparse.Namespace, best: Candidate) -> dict[str, Any]:
    """The flags of `serve`, without dashes before them: those that were given, and the choice."""
    unset = vars(_unset(args.model_id))
    chosen: dict[str, Any] = {"model-id": args.model_id}
    for (
        action
    ) in _model_parser()._actions:  # argparse has no public way to list what a parser takes
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
