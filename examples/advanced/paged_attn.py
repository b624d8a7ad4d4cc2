"""Shape the pool of keys and values, and watch it: `python paged_attn.py [MODEL]`."""

import asyncio

from demo_model import model_path

from mistralrs_sdk import MemoryGpuConfig, ModelBuilder, PagedAttentionMetaBuilder, RequestBuilder

RULES = "You are a polite guide through the museum. You answer in one short sentence. " * 3


async def main(path: str) -> None:
    paged = (
        PagedAttentionMetaBuilder()
        .with_block_size(16)
        .with_gpu_memory(MemoryGpuConfig.ContextSize(2048))  # tokens, all sequences together
        .build()
    )
    # with_paged_attn(None) would give each sequence a cache of its own
    async with await ModelBuilder(path).with_paged_attn(paged).build() as model:
        for question in ("Where are the paintings?", "Where are the statues?"):
            request = (
                RequestBuilder()
                .add_message("system", RULES)
                .add_message("user", question)
                .set_sampler_max_len(16)
            )
            usage = (await model.send_chat_request(request)).usage
            print(f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} from the cache")
        stats = await model.stats()
        print(f"{stats.total_blocks} blocks, {stats.used_blocks} in use")


if __name__ == "__main__":
    asyncio.run(main(model_path()))
