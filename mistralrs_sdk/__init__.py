"""Run language models from Python: `await ModelBuilder("model").build()`, with the engine inside.

Names are imported when first used, so that `import mistralrs_sdk` stays instant.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from mistralrs_sdk._version import __version__

if TYPE_CHECKING:
    from mistralrs_sdk.errors import (
        ConfigError,
        EngineClosedError,
        EngineDeadError,
        InferenceError,
        MistralRsError,
        ModelLoadError,
        QueueFullError,
        RequestError,
        UnsupportedError,
    )

_HOME = {
    "ConfigError": "errors",
    "EngineClosedError": "errors",
    "EngineDeadError": "errors",
    "InferenceError": "errors",
    "MistralRsError": "errors",
    "ModelLoadError": "errors",
    "QueueFullError": "errors",
    "RequestError": "errors",
    "UnsupportedError": "errors",
}

__all__ = [
    "ConfigError",
    "EngineClosedError",
    "EngineDeadError",
    "InferenceError",
    "MistralRsError",
    "ModelLoadError",
    "QueueFullError",
    "RequestError",
    "UnsupportedError",
    "__version__",
]

logging.getLogger("mistralrs_sdk").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
