"""Names of mistral.rs for what this package does not do: making one says so, and the way out."""

from __future__ import annotations

from mistralrs_sdk.unsupported import UnsupportedName


class MultimodalModelBuilder(UnsupportedName):
    """Not done: `UnsupportedError`. Models here read and write text."""

    _way_out = "models here read text only; ModelBuilder loads the text models"


class DiffusionModelBuilder(UnsupportedName):
    """Not done: `UnsupportedError`. No model here makes images."""

    _way_out = "no model here makes images; ModelBuilder loads text models"


class SpeechModelBuilder(UnsupportedName):
    """Not done: `UnsupportedError`. No model here speaks."""

    _way_out = "no model here speaks; ModelBuilder loads text models"


class UqffTextModelBuilder(UnsupportedName):
    """Not done: `UnsupportedError`. UQFF files are not read."""

    _way_out = (
        "UQFF files are not read; give ModelBuilder the original model and quantise it with "
        "with_isq, or give GgufModelBuilder a GGUF file"
    )


class UqffMultimodalModelBuilder(UnsupportedName):
    """Not done: `UnsupportedError`. Models here read and write text."""

    _way_out = "neither UQFF files nor images are read; ModelBuilder loads text models"


class UqffEmbeddingModelBuilder(UnsupportedName):
    """Not done: `UnsupportedError`. UQFF files are not read."""

    _way_out = (
        "UQFF files are not read; give EmbeddingModelBuilder the original model and quantise it "
        "with with_isq"
    )


class XLoraModelBuilder(UnsupportedName):
    """Not done: `UnsupportedError`. Adapters are chosen per request, not mixed by a classifier."""

    _way_out = "adapters are not mixed by a classifier; use LoraModelBuilder and set_adapter"


class GgufXLoraModelBuilder(UnsupportedName):
    """Not done: `UnsupportedError`. Adapters are chosen per request, not mixed by a classifier."""

    _way_out = "adapters are not mixed by a classifier; use with_lora_adapter and set_adapter"


class GgufLoraModelBuilder(UnsupportedName):
    """Not done: `UnsupportedError`. `GgufModelBuilder` has the adapters that replaced these."""

    _way_out = "adapters are dynamic; use GgufModelBuilder(...).with_lora_adapter(alias, source)"


class AnyMoeModelBuilder(UnsupportedName):
    """Not done: `UnsupportedError`. Nothing here is trained."""

    _way_out = "nothing is trained here; load a model that was, with ModelBuilder"


class WebSearchOptions(UnsupportedName):
    """Not done: `UnsupportedError`. Nothing here searches the web."""

    _way_out = "nothing here searches the web; offer your own search with with_tool_callback"


class SearchEmbeddingModel(UnsupportedName):
    """Not done: `UnsupportedError`. Nothing here searches the web."""

    _way_out = "nothing here searches the web; offer your own search with with_tool_callback"


class InputFile(UnsupportedName):
    """Not done: `UnsupportedError`. Files are not given to the model."""

    _way_out = "files are not given to the model; put their text into a message"


class MtpConfig(UnsupportedName):
    """Not done: `UnsupportedError`. Steps are not speculated with a second head or model."""

    _way_out = "nothing is speculated; leave with_mtp_config out"


class UqffWriteConfig(UnsupportedName):
    """Not done: `UnsupportedError`. UQFF files are neither read nor written."""

    _way_out = "UQFF files are not written; with_isq quantises while loading"


class AnyMoeConfig(UnsupportedName):
    """Not done: `UnsupportedError`. No experts are trained here."""

    _way_out = "no experts are trained here; LoRA adapters are chosen with set_adapter"


class AudioInput(UnsupportedName):
    """Not done: `UnsupportedError`. Models here read text only."""

    _way_out = "models here read text only"


class VideoInput(UnsupportedName):
    """Not done: `UnsupportedError`. Models here read text only."""

    _way_out = "models here read text only"


class DiffusionGenerationParams(UnsupportedName):
    """Not done: `UnsupportedError`. No model here makes images."""

    _way_out = "no model here makes images"


class RequestedFile(UnsupportedName):
    """Not done: `UnsupportedError`. Tools here produce no files."""

    _way_out = "tools here produce no files; let a tool callback keep what it makes"


class SearchResult(UnsupportedName):
    """Not done: `UnsupportedError`. Nothing here searches the web."""

    _way_out = "nothing here searches the web; offer your own search with with_tool_callback"


class AnyMoeExpertType(UnsupportedName):
    """Not done: `UnsupportedError`. No experts are trained here."""

    _way_out = "no experts are trained here; LoRA adapters are chosen with set_adapter"


class DiffusionLoaderType(UnsupportedName):
    """Not done: `UnsupportedError`. No model here makes images."""

    _way_out = "no model here makes images"


class SpeechLoaderType(UnsupportedName):
    """Not done: `UnsupportedError`. No model here speaks."""

    _way_out = "no model here speaks"


class MultimodalLoaderType(UnsupportedName):
    """Not done: `UnsupportedError`. Models here read text only."""

    _way_out = "models here read text only"
