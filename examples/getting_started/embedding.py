"""Compare sentences by their vectors: `python embedding.py [EMBEDDING_MODEL]`."""

import asyncio
import sys

from mistralrs_sdk import EmbeddingModelBuilder

MODEL = "Qwen/Qwen3-Embedding-0.6B"
QUESTION = "Where do cats sleep?"
SENTENCES = ("A kitten naps on the sofa.", "The stock market fell.", "Two and two is four.")


async def main(path: str) -> None:
    async with await EmbeddingModelBuilder(path).build() as model:
        question = await model.generate_embedding(QUESTION)
        sentences = await model.generate_embeddings(SENTENCES)

    print(f"{len(question)} dimensions")
    print(QUESTION)
    for text, vector in zip(SENTENCES, sentences, strict=True):
        # vectors of most models have length 1: then the product is the cosine
        cosine = sum(a * b for a, b in zip(question, vector, strict=True))
        print(f"  {cosine:.3f} {text}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else MODEL))
