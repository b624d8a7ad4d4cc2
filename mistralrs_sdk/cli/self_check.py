"""What `doctor` runs in processes of its own: a tiny model, built and asked, reported as JSON.

A process of its own, because a broken torch or a kernel for another CPU may end it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from mistralrs_sdk import ModelBuilder, SamplingParams

_VOCAB = 256
_PROMPT = tuple(range(7, 247, 5))
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": _VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}


def main(mode: str) -> None:
    """Print what a check found; `mode` is "used" or "reference" (torch alone, float32)."""
    if mode == "reference":
        os.environ["MISTRALRS_NATIVE_KERNELS"] = "off"
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder))
        found = asyncio.run(_check(Path(folder), reference=mode == "reference"))
    print(json.dumps(found))


def write_tiny_model(folder: Path) -> None:
    """Write config, random weights that are always the same, and a tokenizer of 256 bytes."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    (folder / "config.json").write_text(json.dumps(_CONFIG))
    random = torch.Generator().manual_seed(0)
    hidden, kv = _CONFIG["hidden_size"], _CONFIG["num_key_value_heads"] * _CONFIG["head_dim"]
    wide = _CONFIG["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    tensors = {"model.norm.weight": torch.ones(hidden)}
    tensors["model.embed_tokens.weight"] = torch.randn(_VOCAB, hidden, generator=random)
    for layer in range(_CONFIG["num_hidden_layers"]):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden)
        for name, (rows, columns) in shapes.items():
            weight = torch.randn(rows, columns, generator=random) * columns**-0.5
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
    save_file(tensors, folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={a: i for i, a in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


async def _check(folder: Path, *, reference: bool) -> dict[str, Any]:
    builder = ModelBuilder(folder).with_progress(False)
    exact = builder.with_force_cpu().with_dtype("f32")
    if reference:
        return {"exact": (await _ask(exact))["logits"]}
    used = await _ask(builder)
    found = {
        "torch": _torch(),
        "settings": used["settings"],
        "free_bytes": (await builder.plan()).free_bytes,
        "used": used["logits"],
        "exact": (await _ask(exact))["logits"],
    }
    if used["settings"]["device"][0] == "cpu":
        found["quantised"] = (await _ask(builder.with_auto_isq(8)))["logits"]
    return found


async def _ask(builder: ModelBuilder) -> dict[str, Any]:
    """The settings of a built model, and the logits after a prompt and then some decoding."""
    async with await builder.build() as model:
        logits, _ = await model.send_raw_chat_request(_PROMPT)
        sampling = SamplingParams(top_k=1, max_len=8, ignore_eos=True)
        await model.send_completion_request(_PROMPT, sampling)
        return {
            "settings": settings_of(model.describe()),
            "logits": [round(value, 6) for value in logits[0][-1].tolist()],
        }


def settings_of(described: str) -> dict[str, list[str]]:
    """The rows of `Model.describe()`: name to value and origin."""
    rows = [re.split(r"\s{2,}", line, maxsplit=2) for line in described.splitlines()]
    return {row[0]: [*row[1:], "", ""][:2] for row in rows}


def _torch() -> dict[str, Any]:
    """What torch was built for and sees."""
    import torch

    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            devices.append(
                {
                    "name": found.name,
                    "compute": f"{found.major}.{found.minor}",
                    "free_bytes": free,
                    "total_bytes": total,
                }
            )
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": devices,
        "mps": torch.backends.mps.is_available(),
    }


if __name__ == "__main__":
    main(sys.argv[1])
