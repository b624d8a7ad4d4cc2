"""How `bench` shows results: tables, JSON and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from mistralrs_sdk import ConfigError, __version__
from mistralrs_sdk.cli.bench_numbers import LoadResult, SingleResult, Spread

_WIDTH = 160
"""Of a table that goes to a file or a pipe."""


def print_single(results: Sequence[SingleResult], *, heading: str) -> None:
    """Show mistral.rs' table: test, tokens per second, latency."""
    from rich.table import Table

    table = Table("Test", title=heading, title_justify="left")
    table.add_column("T/s", justify="right")
    table.add_column("Latency", justify="right")
    for found in results:
        table.add_row(
            found.test,
            f"{found.tokens_per_second:.1f} ± {found.tokens_per_second_std:.1f}",
            f"{found.latency_ms:.2f} ms {found.latency}",
        )
    _print(table)


def print_loads(results: Sequence[LoadResult], *, heading: str) -> None:
    """Show one column for each load."""
    from rich.table import Table

    table = Table("", title=heading, title_justify="left")
    for found in results:
        table.add_column(found.load, justify="right")
    rows: list[tuple[str, list[str]]] = [
        ("requests", [str(found.requests) for found in results]),
        ("failed", [str(found.failed) for found in results]),
        ("seconds", [f"{found.seconds:.1f}" for found in results]),
        ("prompt T/s", [f"{found.prompt_tokens_per_second:.1f}" for found in results]),
        ("output T/s", [f"{found.output_tokens_per_second:.1f}" for found in results]),
        ("requests/s", [f"{found.requests_per_second:.2f}" for found in results]),
    ]
    if any(found.cached_tokens for found in results):
        shares = [found.cached_tokens / max(1, found.prompt_tokens) for found in results]
        rows.append(("prompt from cache", [f"{share:.0%}" for share in shares]))
    for name, field in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("latency", "latency_ms")):
        for percentile in ("p50", "p95", "p99"):
            spreads: list[Spread] = [getattr(found, field) for found in results]
            values = [f"{getattr(spread, percentile):.1f}" for spread in spreads]
            rows.append((f"{name} {percentile} ms", values))
    for name, values in rows:
        table.add_row(name, *values)
    _print(table)


def as_json(results: Sequence[SingleResult | LoadResult], **about: Any) -> str:
    """The same as a JSON document; `about` says what was measured."""
    key = "single" if results and isinstance(results[0], SingleResult) else "loads"
    document = {"version": __version__, **about, key: [attrs.asdict(found) for found in results]}
    return json.dumps(document, indent=2)


def require_matplotlib() -> None:
    """Check before measuring that a plot can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401 (only whether it is there)  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib: pip install 'mistralrs_sdk[docs]', or leave it out"
        ) from error


def plot_loads(results: Sequence[LoadResult], file: Path, *, heading: str) -> None:
    """Draw throughput and latency percentiles over the loads.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    figure.suptitle(heading, fontsize=10)
    rates, first, between = figure.subplots(1, 3)
    places = range(len(results))
    rates.plot(places, [found.output_tokens_per_second for found in results], marker="o")
    rates.set_title("output tokens per second", fontsize=9)
    for axes, field, title in (
        (first, "ttft_ms", "time to first token, ms"),
        (between, "itl_ms", "between tokens, ms"),
    ):
        for percentile, style in (("p50", "-"), ("p95", "--"), ("p99", ":")):
            values = [getattr(getattr(found, field), percentile) for found in results]
            axes.plot(places, values, style, marker="o", label=percentile)
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=8)
    for axes in (rates, first, between):
        axes.set_xticks(places, [found.load for found in results], fontsize=8)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {file} cannot be written: {error}") from error


def _print(table: Any) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(table)
