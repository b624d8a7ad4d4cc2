"""`GET /metrics` for Prometheus, with mistral.rs' names, and `GET /health`."""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from mistralrs_sdk import (
    EngineClosedError,
    EngineDeadError,
    EngineMetrics,
    MistralRsError,
    Model,
    ModelStatus,
)
from mistralrs_sdk.server.errors import HttpError
from mistralrs_sdk.server.middleware import Exchange

_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BYTES = tuple(4.0**power for power in range(3, 14))
"""64 bytes to 64 MiB."""

SCRAPE_SECONDS = 2.0
"""How long an engine in the middle of a step is waited for; then it shows what it showed last."""
HEALTH_SECONDS = 0.05
"""An engine that is dead says so at once; one that is busy may take a whole step."""


class ServerMetrics:
    """What one app has answered, and what its engines last said."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("method", "path", "model")
        self._requests = Counter(
            "http_requests_total",
            "Requests that were answered.",
            (*labels, "status"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "From a request's first byte to the end of its answer.",
            (*labels, "status"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._bytes = Histogram(
            "http_request_body_bytes",
            "Size of the bodies of requests.",
            labels,
            buckets=_BYTES,
            registry=self.registry,
        )
        self._open: set[Exchange] = set()
        self._engines: dict[str, EngineMetrics] = {}
        self.registry.register(self)

    def begun(self, exchange: Exchange) -> None:
        """A request came in."""
        self._open.add(exchange)

    def ended(self, exchange: Exchange, seconds: float) -> None:
        """A request was answered, or its client left."""
        self._open.discard(exchange)
        if exchange.housekeeping:
            return
        labels = (exchange.method, exchange.route, exchange.model)
        self._requests.labels(*labels, str(exchange.status)).inc()
        self._seconds.labels(*labels, str(exchange.status)).observe(seconds)
        self._bytes.labels(*labels).observe(exchange.received)

    async def ask_engines(self, model: Model) -> None:
        """Take what every loaded model counts now; one that does not answer keeps what it said."""
        statuses = dict(model.list_models_with_status())
        loaded = [id for id, status in statuses.items() if status is ModelStatus.LOADED]
        asked = await asyncio.gather(*(_metrics(model, id) for id in loaded))
        fresh = {id: each for id, each in zip(loaded, asked, strict=True) if each is not None}
        kept = {id: each for id, each in self._engines.items() if id in loaded}
        self._engines = kept | fresh

    def shown(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(_WithoutCreated(self.registry))

    def collect(self) -> Iterator[Metric]:
        """What Prometheus' registry asks for."""
        in_flight = GaugeMetricFamily(
            "http_requests_in_flight",
            "Requests that are being answered.",
            labels=("method", "path", "model"),
        )
        counts = Tally(
            (each.method, each.route, each.model) for each in self._open if not each.housekeeping
        )
        for labels, count in counts.items():
            in_flight.add_metric(labels, count)
        yield in_flight
        yield from _engine_families(self._engines)


def routes(*, metrics: bool) -> list[Route]:
    """The routes of this module; without `metrics` it says that they are off."""
    shown = show_metrics if metrics else metrics_are_off
    return [
        Route("/health", health, methods=["GET"]),
        Route("/metrics", shown, methods=["GET"]),
    ]


async def show_metrics(request: Request) -> Response:
    """Everything that is counted, in Prometheus' text format."""
    metrics: ServerMetrics = request.app.state.metrics
    await metrics.ask_engines(request.app.state.model)
    return Response(metrics.shown(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def metrics_are_off(request: Request) -> Response:
    """503: the server was started without metrics."""
    raise HttpError(503, "metrics are off: start the server without --disable-metrics")


async def health(request: Request) -> Response:
    """200 as long as every model that is loaded can answer, else 503 with the reason."""
    model: Model = request.app.state.model
    statuses = model.list_models_with_status()
    dead = {}
    for id, status in statuses:
        if status is ModelStatus.LOADED:
            reason = await _why_dead(model, id)
            if reason is not None:
                dead[id] = reason
    if dead:
        return JSONResponse({"status": "dead", "models": dead}, status_code=503)
    return PlainTextResponse("OK")


async def _why_dead(model: Model, model_id: str) -> str | None:
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            await model.stats(model_id=model_id)
    except TimeoutError:
        return None
    except (EngineDeadError, EngineClosedError) as error:
        return str(error) if not _was_unloaded(model, model_id) else None
    return None


def _was_unloaded(model: Model, model_id: str) -> bool:
    """Whether it went in good order while it was asked."""
    return dict(model.list_models_with_status()).get(model_id) is not ModelStatus.LOADED


async def _metrics(model: Model, model_id: str) -> EngineMetrics | None:
    try:
        async with asyncio.timeout(SCRAPE_SECONDS):
            return await model.metrics(model_id=model_id)
    except (TimeoutError, MistralRsError):
        return None


class _WithoutCreated:
    """A registry without the time each series began, which the text format makes gauges of."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [each for each in metric.samples if not each.name.endswith("_created")]
            yield metric


_GAUGES = {
    "mistralrs_sequences_running": ("running", "Sequences that run."),
    "mistralrs_sequences_waiting": ("waiting", "Sequences that wait."),
    "mistralrs_sequences_capacity": ("capacity", "Most sequences that may run at once."),
    "mistralrs_kv_cache_blocks_used": ("blocks_used", "KV blocks that sequences own."),
    "mistralrs_kv_cache_blocks_total": ("blocks_total", "KV blocks there are."),
    "mistralrs_kv_cache_blocks_prefix_cached": (
        "blocks_cached",
        "KV blocks whose prefix another request could share.",
    ),
}
_COUNTERS = {
    "mistralrs_tokens_processed": ("tokens_processed", "Tokens computed, prompts included."),
    "mistralrs_prefix_cache_lookups": ("prefix_lookups", "Sequences that looked for a prefix."),
    "mistralrs_prefix_cache_hits": ("prefix_hits", "Sequences that found one."),
    "mistralrs_prefix_cache_evictions": ("prefix_evictions", "Cached prefixes that made room."),
    "mistralrs_prefix_cache_tokens_reused": (
        "prefix_tokens_reused",
        "Prompt tokens that were cached.",
    ),
    "mistralrs_paged_preemptions": ("preemptions", "Sequences that lost their blocks."),
}
_BY_REASON = {
    "mistralrs_sequences_completed": ("completed", "Sequences that ran and ended."),
    "mistralrs_sequences_rejected": ("rejected", "Sequences that never ran."),
}
_HISTOGRAMS = {
    "mistralrs_time_to_first_token_seconds": (
        "time_to_first_token",
        "From arrival in the engine to the first token.",
    ),
    "mistralrs_inter_token_latency_seconds": (
        "inter_token_latency",
        "Between two tokens of a sequence.",
    ),
}


def _engine_families(engines: dict[str, EngineMetrics]) -> Iterator[Metric]:
    for name, (field, text) in _GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=("model",))
        for id, each in engines.items():
            gauge.add_metric((id,), getattr(each, field))
        yield gauge
    for name, (field, text) in _COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=("model",))
        for id, each in engines.items():
            counter.add_metric((id,), getattr(each, field))
        yield counter
    for name, (field, text) in _BY_REASON.items():
        counter = CounterMetricFamily(name, text, labels=("model", "reason"))
        for id, each in engines.items():
            for reason, count in getattr(each, field).items():
                counter.add_metric((id, reason), count)
        yield counter
    for name, (field, text) in _HISTOGRAMS.items():
        histogram = HistogramMetricFamily(name, text, labels=("model",))
        for id, each in engines.items():
            values: Any = getattr(each, field)
            histogram.add_metric((id,), _buckets(values.bounds, values.counts), values.total)
        yield histogram


def _buckets(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    """Cumulated, as Prometheus has them."""
    buckets, total = [], 0
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
