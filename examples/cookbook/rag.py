"""Find the passage a question is about, and answer from it: `python rag.py [EMBEDDER [MODEL]]`.

EMBEDDER makes vectors of texts (a hub id or folder), MODEL answers; one handle holds both.
"""

import asyncio
import sys

from demo_model import model_path

from mistralrs_sdk import (
    EmbeddingModelBuilder,
    Model,
    ModelBuilder,
    MultiModelBuilder,
    RequestBuilder,
)

EMBEDDER = "Qwen/Qwen3-Embedding-0.6B"
PASSAGES = (
    "The library opens at nine in the morning and closes at six. It is closed on Sundays.",
    "The swimming pool costs four euros. Children under six pay nothing.",
    "The museum shows paintings of the nineteenth century. Photographs are not allowed.",
)
QUESTIONS = ("How much does it cost to swim?", "When does the library open?")


async def best_passages(model: Model, questions: tuple[str, ...]) -> list[str]:
    """The passage nearest to each question."""
    vectors = await model.generate_embeddings([*PASSAGES, *questions], model_id="embedder")
    known, asked = vectors[: len(PASSAGES)], vectors[len(PASSAGES) :]

    def nearness(question: list[float], place: int) -> float:
        return sum(a * b for a, b in zip(question, known[place], strict=True))

    places = [
        max(range(len(PASSAGES)), key=lambda place, q=question: nearness(q, place))
        for question in asked
    ]
    return [PASSAGES[place] for place in places]


async def answer(model: Model, question: str, passage: str) -> str:
    request = (
        RequestBuilder()
        .add_message("system", f"Answer in one sentence, only from this text: {passage}")
        .add_message("user", question)
        .set_sampler_max_len(32)
    )
    response = await model.send_chat_request(request, model_id="writer")
    return response.choices[0].message.content or ""


async def main(embedder: str, path: str) -> None:
    both = (
        MultiModelBuilder()
        .add_model_with_alias("writer", ModelBuilder(path))
        .add_model_with_alias("embedder", EmbeddingModelBuilder(embedder))
    )
    async with await both.build() as model:
        passages = await best_passages(model, QUESTIONS)
        answers = await asyncio.gather(
            *(answer(model, *each) for each in zip(QUESTIONS, passages, strict=True))
        )
    for question, passage, text in zip(QUESTIONS, passages, answers, strict=True):
        print(f"{question}\n  found: {passage}\n  answer: {text}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else EMBEDDER, model_path(argument=2)))
