"""The models of `quality.py`: weights in one form or another, and what they predict."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mistralrs_sdk.attention.backend import AttentionBackend, Batch
from mistralrs_sdk.attention.cpu import CpuBackend
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.attention.sdpa import UncachedSdpaBackend
from mistralrs_sdk.isq import IsqType
from mistralrs_sdk.loading.checkpoint import Checkpoint
from mistralrs_sdk.loading.forms import Packing, Target, choose_forms, quantise_target
from mistralrs_sdk.loading.loader import load_model, prepare_model
from mistralrs_sdk.models.decoder import CausalLM
from mistralrs_sdk.quant.linear_method import DENSE
from mistralrs_sdk.quant.packed import PackedMethod

F16 = "f16"

_BLOCK_SIZE = 32


def load_dense(checkpoint: Checkpoint) -> CausalLM:
    """All weights in float32."""
    return _load(checkpoint, packing="none", target=quantise_target(None, None))


def load_stored(checkpoint: Checkpoint) -> CausalLM:
    """Weights as a CPU keeps them by itself: blocks as they are stored, floats in float16."""
    return _load(checkpoint, packing="native", target=quantise_target(None, None))


def load_quantised(checkpoint: Checkpoint, kind: str) -> CausalLM:
    """Every matrix in float16 for "f16", else as `with_isq(kind)`."""
    if kind == F16:
        return _load(checkpoint, packing="native", target=lambda name, columns: "F16")
    return _load(checkpoint, packing="native", target=quantise_target(IsqType(kind), None))


def copy_dequantised(model: CausalLM, dense: CausalLM) -> None:
    """Give `dense`, the same model in float32, the weights of `model`."""
    places = dict(dense.named_modules())
    for name, module in model.named_modules():
        method = getattr(module, "method", None)
        if isinstance(method, PackedMethod):
            DENSE.from_dense(places[name], method.to_dense(module))


def predict(model: CausalLM, ids: list[int], *, kv: torch.dtype | None = None) -> Tensor:
    """Logits [len(ids), vocabulary] of a text, through the native attention with keys and values
    in the type `kv`; without one torch attends and keeps none."""
    count = len(ids)
    blocks = -(-count // _BLOCK_SIZE)
    positions = torch.arange(count)
    batch = Batch(
        input_ids=torch.tensor(ids),
        positions=positions,
        slot_mapping=positions + _BLOCK_SIZE,  # the first block is not for use
        logits_indices=positions,
        query_start=[0, count],
        seq_lens=[count],
        block_tables=[list(range(1, blocks + 1))],
    )
    backend = _backend(model, kv, num_blocks=blocks + 1)
    backend.plan(batch)
    return model(batch, backend)


def load_transformers(checkpoint: Checkpoint) -> nn.Module:
    """The same weights in the model of Hugging Face transformers, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**checkpoint.config), attn_implementation="eager", dtype=torch.float32
    )
    weights = {name: source.load().float() for name, source in checkpoint.tensors.items()}
    found = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    missing = set(found.missing_keys) - set(getattr(model, "_tied_weights_keys", None) or ())
    if missing or found.unexpected_keys:
        raise ValueError(
            f"{checkpoint.name} does not fit the model of transformers: missing "
            f"{sorted(missing)}, left over {found.unexpected_keys}"
        )
    return model.eval()


@torch.inference_mode()
def predict_by_transformers(model: nn.Module, ids: list[int]) -> Tensor:
    """Logits [len(ids), vocabulary] of a text."""
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def _load(checkpoint: Checkpoint, *, packing: Packing, target: Target) -> CausalLM:
    model = prepare_model(checkpoint)
    forms = choose_forms(model, checkpoint, dtype=torch.float32, packing=packing, target=target)
    device = torch.device("cpu")
    return load_model(checkpoint, dtype=torch.float32, device=device, model=model, forms=forms)


def _backend(model: CausalLM, kv: torch.dtype | None, *, num_blocks: int) -> AttentionBackend:
    if kv is None:
        return UncachedSdpaBackend()
    return CpuBackend(
        PagedKVCache(
            model.specs, num_blocks=num_blocks, block_size=_BLOCK_SIZE, dtype=kv, device="cpu"
        )
    )
