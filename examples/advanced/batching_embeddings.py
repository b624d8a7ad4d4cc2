"""Embed many texts at once, and check that batches change nothing.

`python batching_embeddings.py [EMBEDDING_MODEL]`
"""

import asyncio
import sys
import time

from mistralrs_sdk import EmbeddingModelBuilder, EmbeddingRequest

MODEL = "Qwen/Qwen3-Embedding-0.6B"
TEXTS = [f"Sentence number {n} is about {n % 7} cats." for n in range(100)]


async def main(path: str) -> None:
    async with await EmbeddingModelBuilder(path).with_max_num_seqs(32).build() as model:
        start = time.perf_counter()
        request = EmbeddingRequest.builder().add_prompts(TEXTS).with_truncate_sequence(True)
        response = await model.send_embedding_request(request)
        seconds = time.perf_counter() - start
        alone = await model.generate_embedding(TEXTS[0])

    print(f"{len(response.vectors)} vectors of {response.dimensions} values")
    print(f"{response.prompt_tokens / seconds:.0f} tokens per second")
    difference = max(abs(a - b) for a, b in zip(response.embeddings[0], alone, strict=True))
    print(f"alone and in the batch differ by at most {difference:.1e}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else MODEL))
