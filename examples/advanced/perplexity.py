"""How well a model predicts a text, from raw logits: `python perplexity.py [MODEL [FILE]]`."""

import asyncio
import math
import pydoc_data.topics
import sys
from pathlib import Path

from demo_model import model_path

from mistralrs_sdk import Model, ModelBuilder, cross_entropy_loss

WINDOW = 512


async def perplexity(model: Model, text: str, *, window: int = WINDOW) -> float:
    """Return exp of the mean loss over all tokens that have one before them in their window."""
    ids = await model.tokenize(text)
    total, count = 0.0, 0
    for start in range(0, len(ids), window):
        logits, tokens = await model.send_raw_chat_request(ids[start : start + window])
        if len(tokens) > 1:
            loss = cross_entropy_loss(logits[0][:-1], tokens[1:])
            total += loss.item() * (len(tokens) - 1)
            count += len(tokens) - 1
    return math.exp(total / count)


def example_text() -> str:
    """The file named on the command line, or some of Python's own documentation."""
    if len(sys.argv) > 2:
        return Path(sys.argv[2]).read_text(encoding="utf-8")
    return pydoc_data.topics.topics["for"]


async def main(path: str) -> None:
    async with await ModelBuilder(path).build() as model:
        print(f"perplexity: {await perplexity(model, example_text()):.3f}")


if __name__ == "__main__":
    asyncio.run(main(model_path()))
