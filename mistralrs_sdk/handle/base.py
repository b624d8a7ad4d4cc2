"""`ModelHandle`: what every part of `Model` stands on, the models behind it."""

from __future__ import annotations

from mistralrs_sdk.errors import RequestError
from mistralrs_sdk.handle.registry import ModelRegistry, Served
from mistralrs_sdk.serving.served_embedder import ServedEmbedder
from mistralrs_sdk.serving.served_model import ServedModel


class ModelHandle:
    """Finds the model that a call is for. `model_id` None is the default model, everywhere."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    async def _chat_model(self, model_id: str | None) -> ServedModel:
        """The model that answers, loaded again if it was unloaded."""
        return _chatting(await self._models.served(model_id))

    def _loaded_chat_model(self, model_id: str | None) -> ServedModel:
        """The model that answers, if it is loaded."""
        return _chatting(self._models.loaded(model_id))

    async def _embedder(self, model_id: str | None) -> ServedEmbedder:
        """The model that embeds, loaded again if it was unloaded."""
        served = await self._models.served(model_id)
        if not isinstance(served, ServedEmbedder):
            raise RequestError(
                f"{served.name} does not embed: build the model with EmbeddingModelBuilder for that"
            )
        return served


def _chatting(served: Served) -> ServedModel:
    if not isinstance(served, ServedModel):
        raise RequestError(
            f"{served.name} embeds and does nothing else: build a model that chats with "
            "ModelBuilder, or call generate_embedding"
        )
    return served
