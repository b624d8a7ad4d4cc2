"""What `peers.py` prints and draws: a table per load, the targets, a plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from peers_numbers import OURS, Weights, best_of, limit_rate, medians, ratio, summary
from peers_work import Load, read_loads

HEADER = (
    "contender",
    "tokens/s",
    "range",
    "to best peer",
    "TTFT p50",
    "p99",
    "ITL p50",
    "p99 ms",
    "of limit",
    "others",
    "rounds",
)
"""TTFT: time to first token; ITL: inter-token latency; both in milliseconds. Others: the CPUs that
other processes kept busy meanwhile."""


@attrs.frozen(kw_only=True)
class Target:
    """A ratio to reach. Names are starts of contenders' names; the best of them counts."""

    load: str
    ours: str = OURS
    against: str = ""
    """Empty: any peer."""
    number: str = "rate"
    at_least: float | None = None
    at_most: float | None = None


TARGETS = (
    Target(load="decode 1", ours="ours gguf", against="llama.cpp gguf", at_least=1.4),
    Target(load="decode 1", ours="ours isq 8", against="llama.cpp Q8_0", at_least=1.25),
    Target(load="decode 1", ours="ours f16", against="llama.cpp F16", at_least=1.15),
    *(Target(load=f"decode {n}", against="llama.cpp", at_least=1.8) for n in (8, 32)),
    *(Target(load=f"prefill {n}", at_least=1.4) for n in (512, 2048)),
    *(
        Target(load=f"prefill {n}", ours="ours gguf", against="llama.cpp gguf", at_least=3.0)
        for n in (512, 2048)
    ),
    *(
        Target(load=f"mix {n}", against=peer, at_least=least)
        for n in (8, 32)
        for peer, least in (("llama.cpp", 2.5), ("mistral.rs", 8.0))
    ),
    *(
        Target(load=f"mix {n}", number=number, at_most=0.5)
        for n in (8, 32)
        for number in ("ttft_p99", "itl_p99")
    ),
    Target(load="prefix shared", number="seconds", at_most=1.0),
    *(Target(load=f"decode {n}", against="transformers static", at_least=5.0) for n in (1, 8)),
    Target(load="mix 32", against="transformers continuous", at_least=8.0),
)


def report(result: Mapping[str, Any], *, markdown: bool) -> str:
    """Everything as text, or as Markdown with pipe tables."""
    weights = Weights(**result["weights"])
    parts = [heading(result)]
    for load in read_loads(result["loads"]):
        runs = result["runs"].get(load.name, {})
        if runs:
            title = f"### {load.name}" if markdown else load.name
            rows = summary(runs, load, weights, result)
            parts.append(f"{title}\n\n{table(rows, markdown=markdown)}")
            failed = result["failures"].get(load.name, {}).items()
            parts.append("\n".join(f"{name} failed: {reason}" for name, reason in failed))
    parts.append("\n".join(targets(result, bullet="* " if markdown else "")))
    return "\n\n".join(part for part in parts if part)


def heading(result: Mapping[str, Any]) -> str:
    """What was measured where, and who was left out."""
    limits = result["limits"]
    lines = [
        f"{result['date']}, {result['machine']}, {result['threads']} threads; {result['model']}; "
        f"{result['versions']}.",
        f"The machine reads {limits['read'] / 1e9:.1f} GB/s and multiplies "
        f"{limits['f32'] / 1e9:.0f} GFLOP/s in float32, {limits['int8'] / 1e9:.0f} GOP/s in int8.",
        *(f"{name} is left out: {reason}" for name, reason in result["left_out"].items()),
    ]
    memory = ", ".join(f"{name} {mib:.0f}" for name, mib in result["memory"].items())
    return "\n".join([*lines, f"MiB resident once loaded: {memory}."])


def table(rows: Sequence[Sequence[str]], *, markdown: bool) -> str:
    """Rows under the header."""
    filled = [list(HEADER), *map(list, rows)]
    if markdown:
        filled.insert(1, ["---", *["---:"] * (len(HEADER) - 1)])
        return "\n".join(f"| {' | '.join(row)} |" for row in filled)
    widths = [max(map(len, column)) for column in zip(*filled, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in filled
    )


def targets(result: Mapping[str, Any], *, bullet: str) -> Iterator[str]:
    """A line for each target whose contenders ran."""
    for target in TARGETS:
        runs = result["runs"].get(target.load, {})
        number = target.number
        mine = best_of(runs, among=target.ours, number=number)
        theirs = best_of(runs, among=target.against, peers=True, number=number)
        if mine is None or theirs is None or not mine.startswith(OURS):
            continue
        found = ratio(runs, mine, theirs, number=number)
        least, most = target.at_least, target.at_most
        met = found >= least if least is not None else found <= (most or 0.0)
        wanted = f"at least {least:g}" if least is not None else f"at most {most:g}"
        yield (
            f"{bullet}{target.load}, {number.replace('_', ' ')}: {mine} has {found:.2f} times "
            f"{theirs}; target {wanted}: {'met' if met else 'MISSED'}"
        )
    yield from own_targets(result, bullet=bullet)


def own_targets(result: Mapping[str, Any], *, bullet: str) -> Iterator[str]:
    """The targets that compare with the limit and with ourselves."""
    loads = {load.name: load for load in read_loads(result["loads"])}
    alone = result["runs"].get("decode 1", {}).get("ours gguf")
    if alone:
        limit = limit_rate(
            loads["decode 1"], Weights(**result["weights"]), result["limits"], stored="gguf"
        )
        part = medians(alone)["rate"] / (limit or float("inf"))
        met = "met" if part >= 0.65 else "MISSED"
        yield f"{bullet}decode 1: ours gguf has {part:.0%} of the limit; target 65%: {met}"
    shared, apart = (result["runs"].get(f"prefix {name}", {}) for name in ("shared", "apart"))
    for name in shared:
        if name.startswith(OURS) and shared[name] and apart.get(name):
            pair = {"shared": shared[name], "apart": apart[name]}
            part = ratio(pair, "shared", "apart", number="seconds")
            met = "met" if part <= 0.5 else "MISSED"
            yield f"{bullet}prefix: {name} takes {part:.2f} of the time apart; target 0.5: {met}"


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw the rates of every load as bars."""
    from matplotlib.figure import Figure

    loads: list[Load] = [
        load
        for load in read_loads(result["loads"])
        if any(result["runs"].get(load.name, {}).values())
    ]
    figure = Figure(figsize=(11, 1 + 2.2 * len(loads)), layout="constrained")
    for axes, load in zip(figure.subplots(len(loads), squeeze=False)[:, 0], loads, strict=True):
        found = {name: runs for name, runs in result["runs"][load.name].items() if runs}
        rates = [medians(runs)["rate"] for runs in found.values()]
        colours = ["tab:orange" if name.startswith(OURS) else "tab:blue" for name in found]
        axes.barh(list(found), rates, color=colours)
        axes.invert_yaxis()
        axes.set_title(load.name, loc="left", fontsize=10)
        axes.tick_params(labelsize=8)
    axes.set_xlabel(f"tokens per second, medians; {result['threads']} threads", fontsize=8)
    figure.savefig(path, dpi=110)
