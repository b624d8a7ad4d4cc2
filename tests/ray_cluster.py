"""A program that serves a tiny model with two replicas of a one-node Ray cluster.

`python -m tests.ray_cluster FOLDER MODEL PORT` says "ready", and ends in good order after a
line on its standard input. In FOLDER each replica leaves a file called after its
process; a file PID.die next to it ends that one's engine, and PID.closed says that it ended in
good order.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from mistralrs_sdk import MemoryGpuConfig, Model, ModelBuilder, PagedAttentionMetaBuilder

ROOT = Path(__file__).parent.parent


class ObservedBuilder(ModelBuilder):
    """A builder whose models can be found, broken and seen to be closed."""

    async def build(self) -> Model:
        """Build, and watch the folder of the model for orders."""
        folder = Path(os.environ["RAY_TEST_FOLDER"])
        model = await super().build()
        own = folder / str(os.getpid())
        close = model.aclose

        async def aclose() -> None:
            await close()
            own.with_suffix(".closed").touch()

        model.aclose = aclose  # type: ignore[method-assign]
        self._watching.append(asyncio.create_task(_die_when_told(model, own.with_suffix(".die"))))
        own.touch()
        return model

    _watching: list[asyncio.Task[None]] = []  # noqa: RUF012 - one model in each process


async def _die_when_told(model: Model, order: Path) -> None:
    while not order.exists():  # noqa: ASYNC240 - a stat takes microseconds
        await asyncio.sleep(0.05)

    def break_it(engine: Any) -> None:
        def step() -> None:
            raise RuntimeError("told to die")

        engine.step = step

    await model.inner().thread.call(break_it)


def main(folder: str, model: str, port: str) -> None:
    """Serve until a line comes, then end in good order."""
    import ray
    from ray import serve

    from mistralrs_sdk.integrations.ray_serve import deployment
    from mistralrs_sdk.server import ServerSettings

    paged = PagedAttentionMetaBuilder().with_gpu_memory(MemoryGpuConfig.ContextSize(40_000))
    builder = ObservedBuilder(model).with_dtype("f32").with_paged_attn(paged.build())
    environment = {"RAY_TEST_FOLDER": folder, "PYTHONPATH": str(ROOT)}
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        object_store_memory=100_000_000,
        runtime_env={"env_vars": environment},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    served = deployment(
        builder,
        num_replicas=2,
        num_cpus=0.4,
        health_check_period_s=0.5,
        graceful_shutdown_wait_loop_s=0.2,
        session_affinity=True,
        settings=ServerSettings(access_log=None),
    )
    serve.run(served.bind())
    print("ready", flush=True)
    sys.stdin.readline()
    serve.delete("default")
    print("ended", flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
