"""From an opened embedding model and settings to its engine; runs on the engine's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import attrs
import torch

from mistralrs_sdk.attention.backend import BatchLists
from mistralrs_sdk.attention.encoder import EncoderBackend
from mistralrs_sdk.config import EngineConfig, Progress
from mistralrs_sdk.cpu_threads import use_threads
from mistralrs_sdk.engine.build import EngineInfo
from mistralrs_sdk.engine.embedding import EmbeddingEngine, EmbedInput, Vector
from mistralrs_sdk.engine.settle import settle
from mistralrs_sdk.loading.embedding import EmbeddingCheckpoint
from mistralrs_sdk.loading.forms import forms_as_kept
from mistralrs_sdk.loading.imatrix import importance_of
from mistralrs_sdk.loading.loader import load_model
from mistralrs_sdk.models.embedding import EmbeddingModel, Pooling


@attrs.frozen(kw_only=True)
class EmbeddingInfo(EngineInfo):
    """What was built; an embedding model has no KV cache, so what concerns that is 0."""

    dimensions: int
    """Size of a vector."""
    pooling: Pooling


def build_embedding_engine(
    opened: EmbeddingCheckpoint,
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[EmbeddingEngine, EmbeddingInfo]:
    """Load the weights and set up the engine; like `build_engine`, on the thread that steps it.

    Raises:
        ConfigError: a setting does not suit this model or this machine.
        ModelLoadError: the weights do not load or do not fit.
    """
    started = time.perf_counter()
    origins: dict[str, str] = {}
    threads = use_threads(config.num_threads)  # first of all: pins what computes from here on
    origins["num_threads"], origins["cpu_affinity"] = threads.origin, threads.pinned_by
    torch.set_num_threads(threads.num_threads)
    context, asked = opened.config.max_position_embeddings, opened.settings.max_seq_length
    config = attrs.evolve(
        config,
        num_threads=threads.num_threads,
        no_kv_cache=True,
        prefix_cache_n=None,
        max_model_len=min(asked or context, context),
    )
    checkpoint = opened.checkpoint
    settled = settle(checkpoint, config, origins)
    device, dtype = settled.device, settled.dtype
    imatrix = config.imatrix
    language_model = load_model(
        checkpoint,
        dtype=dtype,
        device=device,
        model=settled.model,
        forms=settled.forms,
        importance=None if imatrix is None else importance_of(checkpoint, imatrix),
        progress=progress,
        cancelled=cancelled,
    )
    model = EmbeddingModel(language_model, opened.head.to(device)).eval()
    backend = EncoderBackend()
    origins["max_model_len"] = "model"
    info = EmbeddingInfo(
        config=attrs.evolve(settled.config, paged_attn=None),
        origins=origins,
        architecture=opened.config.architecture,
        vocab_size=opened.config.vocab_size,
        num_parameters=settled.plan.num_parameters
        + sum(p.numel() for p in model.head.parameters()),
        packing=settled.packing,
        forms=forms_as_kept(settled.forms, language_model, dtype=dtype),
        kv_bytes_per_token=0,
        kv_dtype=settled.kv_dtype,
        num_blocks=0,
        attention=type(backend).__name__,
        cpu_affinity=threads.pinned,
        load_seconds=time.perf_counter() - started,
        dimensions=opened.dimensions,
        pooling=opened.head.pooling,
    )
    engine = EmbeddingEngine(
        EmbeddingRunner(model, backend, device).run,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        log_throughput=config.throughput_logging,
    )
    return engine, info


@attrs.frozen
class EmbeddingRunner:
    """Runs the model over inputs, all in one flat batch."""

    model: EmbeddingModel
    backend: EncoderBackend
    device: torch.device

    def run(self, inputs: Sequence[EmbedInput]) -> list[Vector]:
        """One vector per input."""
        lengths = [len(asked.ids) for asked in inputs]
        ids = [token for asked in inputs for token in asked.ids]
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        batch = BatchLists(
            input_ids=ids,
            positions=[position for length in lengths for position in range(length)],
            slot_mapping=[],
            logits_indices=list(range(len(ids))),  # pooling takes all rows
            query_start=starts,
            seq_lens=lengths,
            block_tables=[],
        ).batch(self.device)
        self.backend.plan(batch)
        return self.model(batch, self.backend, [asked.skip for asked in inputs]).tolist()
