"""`deployment`: what Ray is asked for, and what a replica does; Ray itself is played here."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import httpx2
import pytest

from mistralrs_sdk import (
    ConfigError,
    EmbeddingModelBuilder,
    EngineClosedError,
    EngineDeadError,
    InferenceError,
    ModelBuilder,
    MultiModelBuilder,
)
from mistralrs_sdk.integrations import ray_serve
from mistralrs_sdk.integrations.ray_serve import deployment
from mistralrs_sdk.server import ServerSettings
from tests.model_helpers import endless, tiny_builder


@attrs.frozen
class Deployed:
    """What `ray.serve.deployment` was called with."""

    replica: Any
    options: dict[str, Any]


@pytest.fixture(autouse=True)
def ray(monkeypatch) -> None:
    """A package in Ray's place that keeps what it is given."""
    serve = types.SimpleNamespace(
        ingress=lambda: lambda replica: replica,
        deployment=lambda replica, **options: Deployed(replica, options),
    )
    package = types.ModuleType("ray")
    package.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", package)


def options_of(builder: Any, **settings: Any) -> dict[str, Any]:
    return deployment(builder, **settings).options


@contextlib.asynccontextmanager
async def started(builder: Any, **settings: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A replica and its app, as Ray starts and ends them."""
    replica = deployment(builder, **settings).replica()
    app = await replica.__serve_build_asgi_app__()
    async with app.router.lifespan_context(app):
        yield replica, app


def test_defaults_suit_a_model():
    """More requests than Ray's five, a quick health check, time for answers, few tries."""
    options = options_of(ModelBuilder("x").with_max_num_seqs(48))

    assert options == {
        "name": "mistralrs",
        "num_replicas": 1,
        "max_ongoing_requests": 96,
        "health_check_period_s": 2,
        "graceful_shutdown_timeout_s": 40,
        "max_constructor_retry_count": 3,
        "ray_actor_options": {"num_cpus": 1, "num_gpus": 0},
    }


def test_rays_options_are_passed_through():
    """They win over ours; autoscaling leaves the number of replicas to Ray."""
    scaling = {"min_replicas": 1, "max_replicas": 4}
    options = options_of(
        ModelBuilder("x"),
        autoscaling_config=scaling,
        max_ongoing_requests=7,
        name="mine",
        ray_actor_options={"resources": {"fast": 1}, "accelerator_type": "H200"},
    )

    assert options["autoscaling_config"] == scaling
    assert (options["max_ongoing_requests"], options["name"]) == (7, "mine")
    assert "num_replicas" not in options
    assert options["ray_actor_options"] == {
        "resources": {"fast": 1},
        "accelerator_type": "H200",
        "num_cpus": 1,
        "num_gpus": 0,
    }


def test_a_replica_may_take_as_long_to_end_as_the_server_allows():
    """The settings' time for the last answers, and some to free the model."""
    options = options_of(ModelBuilder("x"), settings=ServerSettings(drain_seconds=300))

    assert options["graceful_shutdown_timeout_s"] == 310


def test_several_models_count_together():
    """What a replica computes at once is what all its engines do."""
    models = MultiModelBuilder().add_model_with_alias("a", ModelBuilder("a").with_max_num_seqs(8))
    models = models.add_model_with_alias("b", EmbeddingModelBuilder("b"))
    each = [8, EmbeddingModelBuilder("b").config.max_num_seqs]

    assert options_of(models, num_gpus=1)["max_ongoing_requests"] == 2 * sum(each)


@pytest.mark.parametrize(
    ("builder", "settings", "cpus", "threads"),
    [
        (ModelBuilder("x"), {}, 1, 1),
        (ModelBuilder("x"), {"num_cpus": 6}, 6, 6),
        (ModelBuilder("x"), {"num_cpus": 0.5}, 0.5, 1),
        (ModelBuilder("x").with_num_threads(4), {}, 4, 4),
        (ModelBuilder("x").with_num_threads(4), {"num_cpus": 2}, 2, 4),
        (ModelBuilder("x"), {"num_cpus": 6, "tensor_parallel": 2}, 6, 3),
        (ModelBuilder("x"), {"num_cpus": 6, "num_gpus": 1}, 6, None),
        (EmbeddingModelBuilder("x"), {"num_cpus": 3}, 3, 3),
    ],
)
def test_on_cpus_a_replica_has_as_many_threads_as_it_has_been_given(
    builder, settings, cpus, threads, monkeypatch
):
    """Several replicas on one machine would otherwise each take all of its cores."""
    sent = []
    monkeypatch.setattr(ray_serve, "_replica", lambda serve, builder, _: sent.append(builder))

    options = options_of(builder, **settings)

    assert options["ray_actor_options"]["num_cpus"] == cpus
    assert sent[0].config.num_threads == threads


def test_tensor_parallel_needs_as_many_gpus():
    """A replica's ranks are processes on its machine: Ray gives them their devices."""
    found = options_of(ModelBuilder("x"), tensor_parallel=4, num_gpus=4)

    assert found["ray_actor_options"]["num_gpus"] == 4


def test_sessions_are_hashed_by_ray():
    """`session_affinity` is a router of Ray's."""
    (router,) = options_of(ModelBuilder("x"), session_affinity=True)[
        "request_router_config"
    ].values()

    assert router == "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


CPU = ModelBuilder("x").with_force_cpu()
CUDA = ModelBuilder("x").with_device("cuda")
BY_PREFIX = "ray.serve.llm.request_router.PrefixCacheAffinityRouter"


@pytest.mark.parametrize(
    ("builder", "settings", "message"),
    [
        (CUDA, {}, r"num_gpus \(0\) contradicts with_device\('cuda'\)"),
        (CPU, {"num_gpus": 1}, r"num_gpus \(1\) contradicts a builder that computes on the CPU"),
        (ModelBuilder("x"), {"num_gpus": -1}, r"num_gpus \(-1\) must be"),
        (ModelBuilder("x"), {"num_gpus": 1.5}, r"num_gpus \(1\.5\) must be"),
        (ModelBuilder("x"), {"num_gpus": True}, r"num_gpus \(True\) must be"),
        (ModelBuilder("x"), {"num_cpus": -1}, r"num_cpus \(-1\) must be"),
        (ModelBuilder("x"), {"num_gpus": 2}, r"num_gpus \(2\) are more than one model uses"),
        (
            ModelBuilder("x"),
            {"num_gpus": 1, "tensor_parallel": 2},
            r"num_gpus \(1\) is less than tensor_parallel \(2\)",
        ),
        (
            ModelBuilder("x").with_tensor_parallel(4),
            {"tensor_parallel": 2},
            r"tensor_parallel \(2\) contradicts with_tensor_parallel\(4\)",
        ),
        (EmbeddingModelBuilder("x"), {"tensor_parallel": 2}, "needs a ModelBuilder"),
        ("x", {}, r"builder \('x'\) must be a ModelBuilder"),
        (MultiModelBuilder(), {}, "has no models"),
        (
            ModelBuilder("x"),
            {"session_affinity": True, "request_router_config": {}},
            "session_affinity=True say the same",
        ),
        (
            ModelBuilder("x"),
            {"request_router_config": {"request_router_class": BY_PREFIX}},
            "PrefixCacheAffinityRouter.* use session_affinity=True",
        ),
        (ModelBuilder("x"), {"ray_actor_options": {"num_gpus": 1}}, "num_gpus say the same"),
    ],
)
def test_what_contradicts_is_refused_before_anything_runs(builder, settings, message):
    """With the values, and the way out."""
    with pytest.raises(ConfigError, match=message):
        deployment(builder, **settings)


def test_without_ray_the_extra_is_named(monkeypatch):
    """The absence of an optional library is a sentence that says what to install."""
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ImportError, match=r"pip install 'mistralrs_sdk\[ray\]'"):
        deployment(ModelBuilder("x"))


async def test_a_replica_builds_serves_and_closes():
    """The app answers, as its settings say; its end closes the model."""
    async with started(tiny_builder(), settings=ServerSettings(api_key="secret")) as (replica, app):
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as http:
            refused = await http.get("/v1/models")
            answer = await http.get("/v1/models", headers={"x-api-key": "secret"})
        await replica.check_health()

    assert (refused.status_code, answer.status_code) == (401, 200)
    with pytest.raises(EngineClosedError):
        await replica.model.stats()


async def test_a_dead_engine_fails_the_health_check():
    """That is how Ray learns that a replica is to be replaced."""

    def break_it(engine: Any) -> None:
        def step() -> None:
            raise RuntimeError("out of luck")

        engine.step = step

    async with started(tiny_builder()) as (replica, _):
        await replica.check_health()
        await replica.model.inner().thread.call(break_it)
        with pytest.raises((EngineDeadError, InferenceError)):
            await replica.model.send_chat_request(endless())

        with pytest.raises(EngineDeadError, match="out of luck"):
            await replica.check_health()


async def test_an_unloaded_model_is_healthy():
    """It was asked for, and the next request loads it again."""
    async with started(tiny_builder()) as (replica, _):
        await replica.model.unload_model()

        await replica.check_health()


async def test_a_long_step_is_no_failure(monkeypatch):
    """An engine that computes answers later; its replica must not be replaced for it."""
    monkeypatch.setattr(ray_serve, "HEALTH_SECONDS", 0.01)
    released = threading.Event()
    async with started(tiny_builder()) as (replica, _):
        busy = asyncio.ensure_future(
            replica.model.inner().thread.call(lambda engine: released.wait(5))
        )
        await asyncio.sleep(0)

        await replica.check_health()

        assert not busy.done()
        released.set()
        await busy


def test_the_builder_is_sent_as_it_is():
    """All it needs in another process is the builder and the settings: both are values."""
    builder, settings = tiny_builder(), ServerSettings(api_key="secret", cors_origins=("*",))

    assert pickle.loads(pickle.dumps((builder, settings))) == (builder, settings)


def test_importing_the_integration_imports_neither_ray_nor_torch():
    """It is needed to describe a deployment on a machine that computes nothing."""
    code = (
        "import sys, mistralrs_sdk.integrations.ray_serve;"
        "print({'ray', 'torch', 'starlette'} & set(sys.modules))"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)

    assert done.stdout == "set()\n", done.stderr
