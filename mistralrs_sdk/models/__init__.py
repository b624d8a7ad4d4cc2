"""The model families: from a config to a model, without importing more than the one asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.models.config import ModelConfig

if TYPE_CHECKING:
    from mistralrs_sdk.models.decoder import CausalLM

_FAMILIES = {
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

_MODEL_TYPES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

SUPPORTED = tuple(sorted(_FAMILIES))
"""Architectures that can be built, by their Hugging Face class names."""


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face style `config.json`.

    Raises:
        ModelLoadError: a required key is missing or has no sensible value.
        UnsupportedError: the architecture, or a value that changes the arithmetic, is not there.
    """
    try:
        return _family(_architecture(hf)).read_config(hf)
    except (TypeError, AttributeError, ValueError) as error:  # a file may hold anything
        raise ModelLoadError(
            f"the model's config holds a value of the wrong type: {error}"
        ) from error


def build_model(config: ModelConfig) -> CausalLM:
    """Make the model with its parameters unset, on torch's current default device and dtype."""
    return getattr(_family(config.architecture), config.architecture)(config)


def headless(architecture: str) -> str | None:
    """The family's name in that of a class without a head: "Gemma3" in "Gemma3TextModel"."""
    if not architecture.endswith("Model"):
        return None
    return architecture.removesuffix("Model").removesuffix("Text")


def _architecture(hf: Mapping[str, Any]) -> str:
    names = hf.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    kind = hf.get("model_type")
    if kind is None:
        raise ModelLoadError("the model's config has neither architectures nor model_type")
    return _MODEL_TYPES.get(str(kind), str(kind))


def _family(architecture: str) -> Any:
    if f"{headless(architecture)}ForCausalLM" in _FAMILIES:
        raise UnsupportedError(
            f"architecture {architecture} has no head to generate with: it embeds, so load it with "
            "EmbeddingModelBuilder"
        )
    if architecture not in _FAMILIES:
        raise UnsupportedError(
            f"architecture {architecture} is not supported; supported are {', '.join(SUPPORTED)}"
        )
    return import_module(f"mistralrs_sdk.models.{_FAMILIES[architecture]}")
