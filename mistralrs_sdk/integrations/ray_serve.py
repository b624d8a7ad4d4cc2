"""`deployment`: models on Ray Serve, in replicas on one machine or many; needs the extra `ray`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from mistralrs_sdk import (
    ConfigError,
    EmbeddingModelBuilder,
    EngineClosedError,
    ModelBuilder,
    MultiModelBuilder,
    RequestError,
)

if TYPE_CHECKING:
    from ray.serve import Deployment  # pyright: ignore[reportMissingImports]
    from starlette.applications import Starlette

    from mistralrs_sdk import EngineConfig, Model
    from mistralrs_sdk.server import ServerSettings

AnyBuilder = ModelBuilder | EmbeddingModelBuilder | MultiModelBuilder

HEALTH_SECONDS = 5.0
"""How long an engine is waited for; one that takes longer computes a step, and lives."""

HEALTH_PERIOD_SECONDS = 2.0
"""Ray replaces a replica after three failed checks; until then a dead one answers 503, fast."""

CLOSING_SECONDS = 10.0
"""What a replica has beyond the time for its last answers, to free the model."""

BUILD_TRIES = 3
"""What does not load here seldom does the fourth time; Ray would try twenty times."""

_BY_SESSION = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def deployment(
    builder: AnyBuilder,
    *,
    num_replicas: int | str | None = None,
    num_gpus: float = 0,
    num_cpus: float | None = None,
    tensor_parallel: int | None = None,
    session_affinity: bool = False,
    settings: ServerSettings | None = None,
    **options: Any,
) -> Deployment:
    """Return a Ray Serve deployment: `serve.run(deployment(builder).bind())`.

    Each replica builds the model in a process of its own and serves it over HTTP as `create_app`
    does. Ray places replicas on machines, shares requests out among them, and replaces those that
    end or whose engine died. Nothing is loaded before it is run.

    `num_replicas` is a number or "auto"; leave it out with `autoscaling_config`. `num_gpus` are the
    GPUs of one replica, which sees no others: 0 computes on CPUs, a fraction shares one.
    `num_cpus` are its CPUs, and on CPUs its threads too unless the builder says; default: the
    builder's threads, or 1. `tensor_parallel` divides the model over so many ranks in a replica,
    with as many GPUs. `session_affinity` sends requests with the same `x-session-id` header to the
    same replica, whose cache then holds the start of the conversation. `settings` are the HTTP
    server's; what concerns listening is Ray's. `options` go to `ray.serve.deployment`, such as
    `autoscaling_config`, `request_router_config` or `name`; those that are not given suit a model:
    `max_ongoing_requests` is twice what a replica computes at once.

    Raises:
        ImportError: the extra is not installed.
        ConfigError: two settings contradict each other.
    """
    serve = _ray_serve()
    from mistralrs_sdk.server import ServerSettings

    settings = settings or ServerSettings()
    configs = _configs(builder)
    if tensor_parallel is not None:
        builder = _divided(builder, tensor_parallel)
        configs = _configs(builder)
    _check_devices(configs, num_gpus)
    if session_affinity:
        _check_free(options, "request_router_config", "session_affinity=True")
        options["request_router_config"] = {"request_router_class": _BY_SESSION}
    _check_router(options.get("request_router_config"))
    _check_free(options, "ray_actor_options.num_gpus", "num_gpus")
    _check_free(options, "ray_actor_options.num_cpus", "num_cpus")
    if options.get("autoscaling_config") is None:
        options["num_replicas"] = 1 if num_replicas is None else num_replicas
    elif num_replicas is not None:  # Ray decides what goes together
        options["num_replicas"] = num_replicas
    actor = dict(options.pop("ray_actor_options", None) or {})
    builder, actor["num_cpus"] = _with_cpus(builder, num_cpus, on_cpu=num_gpus == 0)
    actor["num_gpus"] = num_gpus
    chosen = {
        "name": "mistralrs",
        "max_ongoing_requests": 2 * sum(config.max_num_seqs for config in configs),
        "health_check_period_s": HEALTH_PERIOD_SECONDS,
        "graceful_shutdown_timeout_s": settings.drain_seconds + CLOSING_SECONDS,
        "max_constructor_retry_count": BUILD_TRIES,
        **options,
    }
    replica = _replica(serve, builder, settings)
    return serve.deployment(replica, ray_actor_options=actor, **chosen)


def _ray_serve() -> Any:
    try:
        from ray import serve  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ImportError(
            f"Ray Serve needs {error.name}: pip install 'mistralrs_sdk[ray]'"
        ) from error
    return serve


def _replica(serve: Any, builder: AnyBuilder, settings: ServerSettings) -> Any:
    """The class that Ray makes one of in each process; it is sent there, with the builder."""

    @serve.ingress()
    class Replica:
        """A model behind the HTTP app."""

        model: Model | None = None

        async def __serve_build_asgi_app__(self) -> Starlette:
            """Load the model in the loop that requests run in; Ray asks for the app once."""
            from mistralrs_sdk.server import create_app

            self.model = await builder.build()
            return _closing(create_app(self.model, settings=settings), self.model)

        async def check_health(self) -> None:
            """Raise `EngineDeadError` if an engine is dead: Ray replaces the replica then."""
            if self.model is not None:
                await _require_alive(self.model)

    return Replica


def _closing(app: Starlette, model: Model) -> Starlette:
    """The app, which frees the model at its end: Ray ends it after the last answer.

    Ray would also await a `__del__` of the replica, but the interpreter calls that too.
    """
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[Any]:
        try:
            async with inner(app) as state:
                yield state
        finally:
            await model.aclose()

    app.router.lifespan_context = lifespan
    return app


async def _require_alive(model: Model) -> None:
    for id in model.list_models():
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await model.stats(model_id=id)
        except TimeoutError:
            continue
        except (EngineClosedError, RequestError):
            if model.is_model_loaded(id):  # else it was unloaded or removed meanwhile
                raise


def _configs(builder: object) -> list[EngineConfig]:
    if isinstance(builder, MultiModelBuilder):
        if not builder.models:
            raise ConfigError("the MultiModelBuilder has no models: add one with add_model")
        return [config for _, each in builder.models for config in _configs(each)]
    if isinstance(builder, ModelBuilder | EmbeddingModelBuilder):
        return [builder.config]
    raise ConfigError(
        f"builder ({builder!r:.80}) must be a ModelBuilder, an EmbeddingModelBuilder or a "
        "MultiModelBuilder: each replica builds a model of its own"
    )


def _divided(builder: AnyBuilder, ranks: int) -> AnyBuilder:
    if not isinstance(builder, ModelBuilder):
        raise ConfigError(
            f"tensor_parallel ({ranks}) needs a ModelBuilder, not {type(builder).__name__}: divide "
            "models of a MultiModelBuilder with their own with_tensor_parallel"
        )
    already = builder.config.tensor_parallel
    if already not in (1, ranks):
        raise ConfigError(
            f"tensor_parallel ({ranks}) contradicts with_tensor_parallel({already}): drop one"
        )
    return builder.with_tensor_parallel(ranks)


def _check_devices(configs: list[EngineConfig], num_gpus: float) -> None:
    valid = isinstance(num_gpus, int | float) and not isinstance(num_gpus, bool)
    if not valid or not 0 <= num_gpus < 1e6 or (num_gpus > 1 and num_gpus != int(num_gpus)):
        raise ConfigError(f"num_gpus ({num_gpus!r}) must be 0, a fraction of 1, or a whole number")
    for config in configs:
        if num_gpus == 0 and config.device not in (None, "cpu"):
            raise ConfigError(
                f"num_gpus (0) contradicts with_device({config.device!r}): Ray shows a replica no "
                "GPU that was not asked for; give num_gpus=1"
            )
        if num_gpus > 0 and config.device == "cpu":
            raise ConfigError(
                f"num_gpus ({num_gpus}) contradicts a builder that computes on the CPU: they would "
                "be taken and not used; leave num_gpus out"
            )
        if num_gpus > 0 and config.tensor_parallel > num_gpus:
            raise ConfigError(
                f"num_gpus ({num_gpus}) is less than tensor_parallel ({config.tensor_parallel}): "
                "each rank needs a GPU of its own"
            )
    most = max(config.tensor_parallel for config in configs)
    if len(configs) == 1 and configs[0].device_mapping is None and num_gpus > max(most, 1):
        raise ConfigError(
            f"num_gpus ({num_gpus}) are more than one model uses with tensor_parallel ({most}): "
            "divide it over them with tensor_parallel, or ask for more replicas"
        )


def _check_free(options: dict[str, Any], name: str, other: str) -> None:
    outer, _, inner = name.partition(".")
    given = options.get(outer)
    if inner:
        given = (given or {}).get(inner)
    if given is not None:
        raise ConfigError(f"{name} ({given!r:.80}) and {other} say the same thing: give one")


def _check_router(config: Any) -> None:
    """Refuse Ray's router by prefixes, which cannot see what an HTTP request asks."""
    if isinstance(config, dict):
        router = config.get("request_router_class")
    else:
        router = getattr(config, "request_router_class", None)
    if "PrefixCacheAffinityRouter" in str(router):
        raise ConfigError(
            f"request_router_class ({router}) finds prompts in arguments of deployment handles, "
            "and HTTP requests are routed before they are read: use session_affinity=True"
        )


def _with_cpus(
    builder: AnyBuilder, num_cpus: float | None, *, on_cpu: bool
) -> tuple[AnyBuilder, float]:
    """The builder with as many threads as the replica has CPUs, and their number."""
    if num_cpus is not None and not (
        isinstance(num_cpus, int | float) and not isinstance(num_cpus, bool) and 0 <= num_cpus < 1e6
    ):
        raise ConfigError(f"num_cpus ({num_cpus!r}) must be a number, 0 or more")
    if isinstance(builder, MultiModelBuilder):
        return builder, 1 if num_cpus is None else num_cpus
    threads = builder.config.num_threads
    ranks = builder.config.tensor_parallel if on_cpu else 1
    if num_cpus is None:
        num_cpus = (threads or 1) * ranks
    if on_cpu and threads is None:
        builder = builder.with_num_threads(max(1, int(num_cpus) // ranks))
    return builder, num_cpus
