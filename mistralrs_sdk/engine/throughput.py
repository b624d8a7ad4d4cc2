"""The throughput line: every few seconds, what the engine did since the last one."""

from __future__ import annotations

import logging
import time

from mistralrs_sdk.engine.scheduler import SchedulerStats

logger = logging.getLogger("mistralrs_sdk.throughput")

INTERVAL_S = 5.0


class ThroughputLog:
    """Logs tokens per second, the prefix hit rate and the queue while the engine works."""

    def __init__(self, stats: SchedulerStats) -> None:
        self._last = stats
        self._since: float | None = None

    def before_step(self) -> None:
        """Start an interval if none runs: idle time does not count."""
        if self._since is None:
            self._since = time.monotonic()

    def after_step(self, stats: SchedulerStats) -> None:
        """Log if the interval is over or nothing is left to do; the hit rate is the interval's."""
        assert self._since is not None, "before_step comes first"
        now = time.monotonic()
        elapsed = now - self._since
        idle = not stats.running and not stats.waiting
        if elapsed < INTERVAL_S and not idle:
            return
        tokens = stats.computed_tokens - self._last.computed_tokens
        lookups = stats.prefix_lookups - self._last.prefix_lookups
        hits = stats.prefix_hits - self._last.prefix_hits
        logger.info(
            "%.1f tokens/s, prefix cache hits %s, %d running, %d waiting, %d of %d blocks used",
            tokens / max(elapsed, 1e-9),
            f"{hits / lookups:.0%}" if lookups else "-",
            stats.running,
            stats.waiting,
            stats.used_blocks,
            stats.total_blocks,
        )
        self._last, self._since = stats, None if idle else now
