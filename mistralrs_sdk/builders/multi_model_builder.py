"""`MultiModelBuilder`: describe several models behind one handle, then `await build()` it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import attrs

from mistralrs_sdk.builders.lora_builder import LoraModelBuilder
from mistralrs_sdk.builders.model_builder import ModelBuilder
from mistralrs_sdk.config import PagedAttentionConfig
from mistralrs_sdk.errors import ConfigError
from mistralrs_sdk.handle.registry import DEFAULT, AnyModelBuilder, ModelRegistry

if TYPE_CHECKING:
    from mistralrs_sdk.handle.model import Model
    from mistralrs_sdk.plan import MemoryPlan

logger = logging.getLogger("mistralrs_sdk.models")


@attrs.frozen
class MultiModelBuilder:
    """Describes a `Model` that holds several models, each on an engine of its own.

    `MultiModelBuilder().add_model_with_alias("small", a).add_model_with_alias("large", b)`. Each
    method returns a new builder. Requests choose a model by `model_id`; the first one added is the
    default unless `with_default_model` says otherwise.

    Raises:
        ConfigError: from each method, at once: an id is taken or unknown.
    """

    models: tuple[tuple[str, AnyModelBuilder], ...] = ()
    """Each model's id and what builds it."""
    default: str | None = None
    """The id of the default model; None is the first one."""

    def add_model(self, builder: AnyModelBuilder) -> Self:
        """Add a model under the name it is loaded from: its hub id, folder or file."""
        _require_builder("add_model", builder)
        return self.add_model_with_alias(builder.source.model_id, builder)

    def add_model_with_alias(self, alias: str, builder: AnyModelBuilder) -> Self:
        """Add a model under this id; the name it is loaded from means it too.

        If several are loaded from that name, it means the first of them.
        """
        if not isinstance(alias, str) or not alias or alias == DEFAULT:
            raise ConfigError(f'alias {alias!r} must be a non-empty str other than "{DEFAULT}"')
        _require_builder(f"model {alias!r}", builder)
        if alias in dict(self.models):
            raise ConfigError(
                f"two models are called {alias!r}: give one another id with add_model_with_alias"
            )
        return attrs.evolve(self, models=(*self.models, (alias, builder)))

    def with_default_model(self, model_id: str) -> Self:
        """Let requests that name no model go to this one, by id or source. Default: the first."""
        sources = [builder.source.model_id for _, builder in self.models]
        if model_id not in (*dict(self.models), *sources):
            shown = ", ".join(repr(id) for id, _ in self.models) or "none yet"
            raise ConfigError(
                f"default model {model_id!r} is not among those added ({shown}): add it first"
            )
        return attrs.evolve(self, default=model_id)

    async def build(self) -> Model:
        """Load all models, one after the other.

        Models on one device share the memory for their KV caches: automatic sizes and fractions in
        proportion to `max_num_seqs`, and an amount in MiB is taken as far as it fits. If one model
        does not load, those that did are closed; the error says which one it was.

        Raises:
            ConfigError: there is no model, or a setting does not suit one.
            ModelLoadError, UnsupportedError: as `ModelBuilder.build`.
        """
        from mistralrs_sdk.handle.model import Model

        if not self.models:
            raise ConfigError("MultiModelBuilder holds no model: call add_model first")
        registry = ModelRegistry()
        try:
            for number, (model_id, builder) in enumerate(await _share_memory(self.models), start=1):
                logger.info("loading model %d of %d: %s", number, len(self.models), model_id)
                try:
                    await registry.add(model_id, builder)
                except Exception as error:
                    error.add_note(f"while loading model {model_id!r}")
                    raise
            if self.default is not None:
                registry.default = self.default
        except BaseException:
            await registry.aclose()
            raise
        return Model(registry)


def _require_builder(what: str, builder: object) -> None:
    if isinstance(builder, type) or not callable(getattr(builder, "serve", None)):
        raise ConfigError(
            f"{what}: {builder!r:.80} must be a model builder, such as ModelBuilder(...)"
        )


async def _share_memory(
    models: Sequence[tuple[str, AnyModelBuilder]],
) -> list[tuple[str, AnyModelBuilder]]:
    """The builders with what each may take of the memory they share."""
    from mistralrs_sdk.builders.kv_shares import share_kv_memory

    models = [
        (model_id, builder.builder if isinstance(builder, LoraModelBuilder) else builder)
        for model_id, builder in models
    ]
    paged = {
        model_id: builder
        for model_id, builder in models
        if isinstance(builder, ModelBuilder) and builder.config.paged_attn is not None
    }
    if len(paged) < 2:
        return list(models)
    plans: list[MemoryPlan] = []
    for model_id, builder in paged.items():
        try:
            plans.append(await builder.plan())
        except Exception as error:
            error.add_note(f"while planning model {model_id!r}")
            raise
    shared = dict(models)
    sizes = share_kv_memory(plans, [builder.config for builder in paged.values()])
    for (model_id, builder), size in zip(paged.items(), sizes, strict=True):
        if size is not None:
            config = builder.config.paged_attn
            paging = PagedAttentionConfig() if config in (None, "auto") else config
            shared[model_id] = builder.with_paged_attn(attrs.evolve(paging, gpu_memory=size))
    return list(shared.items())
