"""How `tune` shows what it found: a table, or JSON."""

from __future__ import annotations

import json
from typing import Any

from mistralrs_sdk import __version__
from mistralrs_sdk.cli.tune_estimate import Candidate, Findings
from mistralrs_sdk.cli.tune_probe import CLIENTS

_WIDTH = 160
"""Of a table that goes to a file or a pipe."""


def as_json(found: Findings, best: Candidate, *, model: str, profile: str, command: str) -> str:
    """Everything, in bytes, tokens and tokens a second."""
    document = {
        "version": __version__,
        "model": model,
        "profile": profile,
        "device": found.plan.device,
        "dtype": found.plan.dtype,
        "measured_seconds": round(found.seconds, 2),
        "unmeasured": found.unmeasured,
        "candidates": [_entry(candidate) for candidate in found.candidates],
        "recommended": None if best.bits is None else str(best.bits),
        "command": command,
    }
    return json.dumps(document, indent=2)


def print_table(
    found: Findings, best: Candidate, *, model: str, profile: str, command: str
) -> None:
    """One row for each candidate, with a star at the best; then the command that serves it."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "Quality", "Weights", title=model, title_justify="left")
    rates = [f"Decode T/s, {n} at once" if n > 1 else "Decode T/s" for n in CLIENTS]
    columns = ("MiB", "KV MiB", "KV tokens", "Context", *rates, "Prefill T/s")
    for name in columns:
        table.add_column(name, justify="right")
    for candidate in found.candidates:
        name = f"{candidate.name} *" if candidate is best else candidate.name
        plan = candidate.plan
        if plan is None:
            table.add_row(name, candidate.quality, "does not fit", *["-"] * len(columns))
            continue
        table.add_row(
            name,
            candidate.quality,
            plan.weights,
            f"{plan.weight_bytes / 2**20:.0f}",
            f"{plan.kv_bytes / 2**20:.0f}",
            str(plan.num_tokens),
            str(plan.max_model_len),
            *_shown_rates(candidate),
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(table)
    for line in (*_about_speeds(found), *_reasons(found)):
        print(line)
    if best.quality == "degraded":
        print(
            "Nothing better fits: expect answers to suffer; a smaller model may serve you better."
        )
    print(f"Recommended ({profile}): {best.name}\n  {command}")


def _entry(candidate: Candidate) -> dict[str, Any]:
    plan, times = candidate.plan, candidate.times
    rates = () if times is None else times.decode_rates
    return {
        "isq": None if candidate.bits is None else str(candidate.bits),
        "quality": candidate.quality,
        "fits": plan is not None,
        "reason": candidate.reason,
        "weights": plan and plan.weights,
        "weight_bytes": plan and plan.weight_bytes,
        "kv_bytes": plan and plan.kv_bytes,
        "kv_tokens": plan and plan.num_tokens,
        "context": plan and plan.max_model_len,
        "measured": candidate.measured,
        "decode_tokens_per_second": rates[0] if rates else None,
        "decode_tokens_per_second_at_once": dict(zip(map(str, CLIENTS), rates, strict=False)),
        "prefill_tokens_per_second": times and times.prefill_rate,
    }


def _shown_rates(candidate: Candidate) -> list[str]:
    if candidate.times is None:
        return ["-"] * (len(CLIENTS) + 1)
    about = "" if candidate.measured else "~"
    rates = (*candidate.times.decode_rates, candidate.times.prefill_rate)
    return [f"{about}{rate:.{0 if rate >= 10 else 1}f}" for rate in rates]


def _about_speeds(found: Findings) -> list[str]:
    if found.unmeasured is not None:
        return [f"No speeds: {found.unmeasured}."]
    plan = found.plan
    if all(candidate.times is None for candidate in found.candidates):
        return [f"No speeds: no slice of the model could be built on {plan.device}."]
    lines = [
        f"Expected from a slice of the model that was measured for {found.seconds:.0f} s on "
        f"{plan.device} in {plan.dtype}; bench measures the whole."
    ]
    if any(c.times is not None and not c.measured for c in found.candidates):
        lines.append("~: time ran out; from another candidate, by size.")
    return lines


def _reasons(found: Findings) -> list[str]:
    return [
        f"{candidate.name}: {' '.join(candidate.reason.split())}"
        for candidate in found.candidates
        if candidate.reason is not None
    ]
