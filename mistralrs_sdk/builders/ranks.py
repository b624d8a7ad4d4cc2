"""`serve_rank`: what a process does that is a rank above 0 of a tensor-parallel model."""

from __future__ import annotations

import os

from mistralrs_sdk.builders.model_builder import ModelBuilder
from mistralrs_sdk.engine.rank_place import place_of
from mistralrs_sdk.logs import configure_logging


def serve_rank(builder: ModelBuilder) -> bool:
    """Compute for rank 0 if this process is a rank above 0; False at once if it is not.

    Call it before `build()` in a script that torchrun starts once per rank, or that runs on several
    machines: it returns True when rank 0 has closed its model. Which rank this is the environment
    says (see docs/tensor_parallel.md). It blocks: give it a process, or a thread, of its own.

    Raises:
        ConfigError: the environment does not suit `with_tensor_parallel`.
        ModelLoadError, UnsupportedError: as `build()`.
        EngineDeadError: rank 0 ended without closing its model.
    """
    config = builder.config
    if config.tensor_parallel == 1:
        return False
    place = place_of(os.environ, config.tensor_parallel)
    if place.rank == 0:
        return False
    from mistralrs_sdk.engine.worker import serve_place

    if builder.logs_to_stderr:
        configure_logging()
    serve_place(place, builder.source, config)
    return True
