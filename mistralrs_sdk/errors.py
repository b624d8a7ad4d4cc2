"""The exceptions of the package.

    MistralRsError
      ConfigError(ValueError)    a setting is out of range, or two settings contradict
      ModelLoadError             not found, download failed, corrupt, out of memory while loading
        UnsupportedError         architecture, quantisation, backend: names every reason
      RequestError(ValueError)   empty or too long prompt, bad sampling value, template refusal
        AdapterError             an adapter that is not there, or may not be loaded; `kind` says why
      QueueFullError             the admission limit is reached
      InferenceError             this request failed; `partial_response` is what it had produced
        DeadlineError            the request's deadline passed
      EngineDeadError            the engine stopped; its cause is chained
      EngineClosedError          used after `aclose()`

Catch `MistralRsError` to catch all of them; catch a leaf to act on one.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

AdapterErrorKind = Literal[
    "runtime_unavailable",
    "invalid_alias",
    "alias_too_long",
    "already_loaded",
    "not_found",
    "generation_not_found",
    "generation_mismatch",
    "rank_limit",
    "adapter_limit",
    "byte_limit",
]
"""What an `AdapterError` is about; mistral.rs' names."""


class MistralRsError(Exception):
    """Any error this package raises on purpose."""


class ConfigError(MistralRsError, ValueError):
    """A setting is out of range, or contradicts another."""


class ModelLoadError(MistralRsError):
    """The model cannot be found, fetched, read or held in memory."""


class UnsupportedError(ModelLoadError):
    """The model or the machine needs something this package does not do."""


class RequestError(MistralRsError, ValueError):
    """The request itself is at fault; nothing was computed."""


class AdapterError(RequestError):
    """An adapter is not there, or loading it would break a limit; nothing was changed."""

    def __init__(self, message: str, *, kind: AdapterErrorKind) -> None:
        super().__init__(message)
        self.kind: AdapterErrorKind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), kind=self.kind), self.args


class QueueFullError(MistralRsError):
    """Too many requests are waiting; try again later."""


class InferenceError(MistralRsError):
    """One request failed while it was running; the others go on."""

    def __init__(self, message: str, *, partial_response: Any = None) -> None:
        super().__init__(message)
        self.partial_response = partial_response


class DeadlineError(InferenceError):
    """The request's deadline (`with_deadline`) passed before its answer was complete."""


class EngineDeadError(MistralRsError):
    """The engine stopped because of the chained error; build the model again."""


class EngineClosedError(MistralRsError):
    """The model was closed."""
