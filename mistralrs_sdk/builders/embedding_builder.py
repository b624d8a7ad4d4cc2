"""`EmbeddingModelBuilder`: describe an embedding model step by step, then `await build()` it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from mistralrs_sdk.builders.model_builder import ModelBuilder, PathLike
from mistralrs_sdk.config import EngineConfig, ModelDType, ModelSource, Progress, TokenSource
from mistralrs_sdk.errors import UnsupportedError
from mistralrs_sdk.isq import IsqBits, IsqType
from mistralrs_sdk.logs import configure_logging
from mistralrs_sdk.topology import Topology

if TYPE_CHECKING:
    from mistralrs_sdk.handle.model import Model
    from mistralrs_sdk.serving.served_embedder import ServedEmbedder


@attrs.frozen(init=False, repr=False)
class EmbeddingModelBuilder:
    """Describes a model that embeds: `await EmbeddingModelBuilder("path/to/folder").build()`.

    `model_id` is a Hugging Face id or a local folder with safetensors that says how it pools, as
    sentence-transformers writes it. Like `ModelBuilder`, it never changes: each method returns a
    new one.

    Raises:
        ConfigError: from each method, at once: a value is out of range or contradicts another.
        UnsupportedError: likewise, for what this package does not do.
    """

    base: ModelBuilder
    """The settings that it has in common with models that chat."""

    def __init__(self, model_id: PathLike) -> None:
        self._start(ModelBuilder(model_id))

    @property
    def source(self) -> ModelSource:
        """Where the files come from."""
        return self.base.source

    @property
    def config(self) -> EngineConfig:
        """How the engine runs; what concerns keys, values and drawing has no part."""
        return self.base.config

    async def build(self) -> Model:
        """Load the model and start its engine; it embeds and does not chat.

        Raises:
            ModelLoadError: it cannot be found, fetched, read or held in memory, or does not say
                how it pools.
            UnsupportedError: it needs something this package does not do; the message says what.
        """
        from mistralrs_sdk.handle.model import Model

        return await Model.build(self)

    async def serve(self) -> ServedEmbedder:
        """Load the model and start its engine, without a handle: `Model` does this to load it.

        Raises:
            ModelLoadError, UnsupportedError: as `build()`.
        """
        from mistralrs_sdk.serving.served_embedder import ServedEmbedder

        if self.base.logs_to_stderr or self.base.config.throughput_logging:
            configure_logging()
        return await ServedEmbedder.build(self)

    # How requests share the engine

    def with_max_num_seqs(self, max_num_seqs: int) -> EmbeddingModelBuilder:
        """Compute at most this many inputs in a step. Default 32, at least 1."""
        return self._with(self.base.with_max_num_seqs(max_num_seqs))

    def with_max_num_batched_tokens(self, tokens: int) -> EmbeddingModelBuilder:
        """Compute at most this many tokens in a step; a longer input goes alone. Default 4096."""
        return self._with(self.base.with_max_num_batched_tokens(tokens))

    # Where and how it computes

    def with_dtype(self, dtype: ModelDType | str) -> EmbeddingModelBuilder:
        """Compute in this type: a `ModelDType` or "auto", "bf16", "f16", "f32". Default AUTO."""
        return self._with(self.base.with_dtype(dtype))

    def with_device(self, device: str) -> EmbeddingModelBuilder:
        """Run on "cpu", "cuda", "cuda:N" or "mps". Default: the best there is."""
        return self._with(self.base.with_device(device))

    def with_force_cpu(self) -> EmbeddingModelBuilder:
        """Run on the CPU even if there is a GPU."""
        return self._with(self.base.with_force_cpu())

    def with_num_threads(self, threads: int) -> EmbeddingModelBuilder:
        """Use this many CPU threads, 1 to 1024. Default: the physical cores it may use."""
        return self._with(self.base.with_num_threads(threads))

    # What its weights are quantised to while loading

    def with_isq(self, isq: IsqType | str) -> EmbeddingModelBuilder:
        """Quantise to this type: an `IsqType`, or text: "q8_0" ("8" is eight bits). Default: no."""
        return self._with(self.base.with_isq(isq))

    def with_auto_isq(self, bits: IsqBits | int | str) -> EmbeddingModelBuilder:
        """Quantise to 2, 3, 4, 5, 6 or 8 bits a weight, as suits the device. Default: no."""
        return self._with(self.base.with_auto_isq(bits))

    def with_topology(self, topology: Topology) -> EmbeddingModelBuilder:
        """Quantise some layers to types of their own; these win over `with_isq`. Default: none."""
        return self._with(self.base.with_topology(topology))

    def with_topology_from_path(self, path: PathLike) -> EmbeddingModelBuilder:
        """The same from a YAML file, which is read now (see `Topology.from_str`)."""
        return self._with(self.base.with_topology_from_path(path))

    def with_imatrix(self, path: PathLike) -> EmbeddingModelBuilder:
        """Weigh the errors of quantising to q2k to q6k by this importance matrix. Default: none."""
        return self._with(self.base.with_imatrix(path))

    def with_calibration_file(self, path: PathLike) -> EmbeddingModelBuilder:
        """Not done: `UnsupportedError`. `with_imatrix` takes a matrix that was collected before."""
        return self._with(self.base.with_calibration_file(path))

    # Where the files come from

    def with_tokenizer_json(self, path: PathLike) -> EmbeddingModelBuilder:
        """Use this tokenizer.json instead of the model's tokenizer, the default."""
        return self._with(self.base.with_tokenizer_json(path))

    def with_token_source(self, source: TokenSource | str) -> EmbeddingModelBuilder:
        """Take the Hugging Face token from here: a `TokenSource` or its text, such as "env:X".

        Default: HF_TOKEN or the stored token, if there is one.
        """
        return self._with(self.base.with_token_source(source))

    def with_hf_revision(self, revision: str) -> EmbeddingModelBuilder:
        """Take this branch, tag or commit of the hub repository. Default: its main branch."""
        return self._with(self.base.with_hf_revision(revision))

    def from_hf_cache_path(self, path: PathLike) -> EmbeddingModelBuilder:
        """Keep downloads in this folder. Default: huggingface_hub's own."""
        return self._with(self.base.from_hf_cache_path(path))

    # What is shown

    def with_logging(self) -> EmbeddingModelBuilder:
        """Let `build()` send this package's log to standard error; RUST_LOG sets its level."""
        return self._with(self.base.with_logging())

    def with_throughput_logging(self) -> EmbeddingModelBuilder:
        """Log tokens per second and what waits now and then."""
        return self._with(self.base.with_throughput_logging())

    def with_progress(self, progress: Progress = True) -> EmbeddingModelBuilder:
        """Show progress bars while loading, or call `progress(what, done, total)`.

        Default: bars if stderr is a terminal.
        """
        return self._with(self.base.with_progress(progress))

    # What mistral.rs has here and this package does not do

    def with_loader_type(self, loader_type: object) -> NoReturn:
        """Not done: `UnsupportedError`. The architecture is read from the model's config."""
        raise _unsupported("with_loader_type", loader_type, "the config says what the model is")

    def with_device_mapping(self, mapping: object) -> NoReturn:
        """Not done: `UnsupportedError`. A model is on one device as a whole."""
        raise _unsupported("with_device_mapping", mapping, "with_device chooses the only device")

    def write_uqff(self, config: object) -> NoReturn:
        """Not done: `UnsupportedError`. UQFF files are not written."""
        raise _unsupported("write_uqff", config, "with_isq quantises whenever the model is loaded")

    def from_uqff(self, paths: object) -> NoReturn:
        """Not done: `UnsupportedError`. UQFF files are not read."""
        raise _unsupported("from_uqff", paths, "load the original model and quantise with with_isq")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Say of a setting for chats that it has no part here."""
            why = "; it concerns models that chat" if hasattr(ModelBuilder, name) else ""
            raise AttributeError(f"EmbeddingModelBuilder has no {name}{why}")

    def __repr__(self) -> str:
        return repr(self.base).replace("ModelBuilder", type(self).__name__, 1)

    def _with(self, base: ModelBuilder) -> EmbeddingModelBuilder:
        copy = object.__new__(EmbeddingModelBuilder)
        copy._start(base)
        return copy

    def _start(self, base: ModelBuilder) -> None:
        self.__attrs_init__(base=base)  # type: ignore[attr-defined]


def _unsupported(method: str, value: object, way_out: str) -> UnsupportedError:
    return UnsupportedError(f"{method}({value!r:.80}) is not supported: {way_out}")
