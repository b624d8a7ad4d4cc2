"""Run a GGUF file from a folder and see what it resolved to: `python gguf_locally.py [FILE]`."""

import asyncio
from pathlib import Path

from demo_model import model_path

from mistralrs_sdk import GgufModelBuilder, MemoryGpuConfig, PagedAttentionMetaBuilder


async def main(path: str) -> None:
    file = Path(path)
    paged = PagedAttentionMetaBuilder().with_gpu_memory(MemoryGpuConfig.ContextSize(4096)).build()
    builder = (
        GgufModelBuilder(file.parent, [file.name])
        .with_force_cpu()
        .with_paged_attn(paged)
        .with_max_model_len(2048)
    )
    async with await builder.build() as model:
        print(model.describe())
        print(await model.chat("What is the capital of France?"))


if __name__ == "__main__":
    asyncio.run(main(model_path()))
