"""Tiny embedding models in sentence-transformers' layout, written without that package."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, processors

from mistralrs_sdk.builders.embedding_builder import EmbeddingModelBuilder
from tests.checkpoint_files import write_json
from tests.tiny_models import tiny_config, write_tokenizer

_TYPE = "sentence_transformers.models."

Dense = tuple[int, int, bool, str]
"""In, out, whether there is a bias, name of the activation's class."""


@functools.cache
def bare_folder(kind: str) -> Path:
    """A model without a head: "qwen3" with an EOS after each text, "llama" without, "gemma" that
    attends both ways, with a BOS before and an EOS after."""
    from transformers import AutoModel

    torch.manual_seed(0)
    config = tiny_config({"gemma": "gemma3"}.get(kind, kind))
    if kind == "gemma":
        changes = {"use_bidirectional_attention": True, "rope_parameters": None}
        config = type(config)(**{**config.to_dict(), **changes})
    model = AutoModel.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key:
                weight.uniform_(0.5, 2).sub_(1.0 if kind == "gemma" else 0.0)
    folder = Path(tempfile.mkdtemp(prefix=f"tiny-{kind}-embedding-"))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    templates = {"qwen3": "$A <eos>", "gemma": "<bos> $A <eos>"}
    if kind in templates:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=templates[kind], special_tokens=[("<bos>", 1), ("<eos>", 2)]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def embedding_folder(
    folder: Path,
    kind: str = "qwen3",
    *,
    pooling: str | Sequence[str] | None = "lasttoken",
    pooling_config: Mapping[str, Any] | None = None,
    dense: Sequence[Dense] = (),
    normalize: bool = True,
    prompts: Mapping[str, str] | None = None,
    default_prompt_name: str | None = None,
    max_seq_length: int | None = None,
) -> Path:
    """A complete folder; `pooling_config` takes the place of the usual one, None of all modules."""
    shutil.copytree(bare_folder(kind), folder, dirs_exist_ok=True)
    if pooling is None:
        return folder
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    listed = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (folder / "1_Pooling").mkdir()
    config = {"word_embedding_dimension": size, "pooling_mode": pooling}
    write_json(folder / "1_Pooling/config.json", pooling_config or config)
    generator = torch.Generator().manual_seed(1)
    for number, (inside, outside, bias, activation) in enumerate(dense, start=2):
        path = f"{number}_Dense"
        (folder / path).mkdir()
        settings = {
            "in_features": inside,
            "out_features": outside,
            "bias": bias,
            "activation_function": f"torch.nn.modules.{activation}",
        }
        write_json(folder / path / "config.json", settings)
        tensors = {"linear.weight": 0.1 * torch.randn(outside, inside, generator=generator)}
        if bias:
            tensors["linear.bias"] = torch.randn(outside, generator=generator)
        save_file(tensors, folder / path / "model.safetensors")
        listed.append((path, "Dense"))
    if normalize:
        listed.append((f"{len(listed)}_Normalize", "Normalize"))
        (folder / listed[-1][0]).mkdir()
    write_json(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": _TYPE + name}
            for i, (path, name) in enumerate(listed)
        ],
    )
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "prompts": dict(prompts or {}),
            "default_prompt_name": default_prompt_name,
            "similarity_fn_name": "cosine",
        },
    )
    if max_seq_length is not None:
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_seq_length})
    return folder


def embedder(folder: Path) -> EmbeddingModelBuilder:
    """A builder for such a folder, in float32 throughout like the oracle."""
    return EmbeddingModelBuilder(folder).with_force_cpu().with_num_threads(1).with_dtype("f32")


def change_module(folder: Path, number: int, **changes: Any) -> None:
    """Change an entry of modules.json."""
    path = folder / "modules.json"
    listed = json.loads(path.read_text())
    listed[number] |= changes
    write_json(path, listed)
