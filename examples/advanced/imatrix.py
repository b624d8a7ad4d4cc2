"""Quantise with an importance matrix: `python imatrix.py IMATRIX [MODEL]`.

IMATRIX is what llama.cpp's `llama-imatrix -m MODEL.gguf -f text.txt` writes: how strongly each
input of each weight was used on that text. Few bits keep more of the model with it.
"""

import asyncio
import sys

from demo_model import model_path

from mistralrs_sdk import IsqType, ModelBuilder, cross_entropy_loss


async def main(imatrix: str, path: str) -> None:
    builder = ModelBuilder(path).with_isq(IsqType.Q4K)
    for name, described in (("without", builder), ("with", builder.with_imatrix(imatrix))):
        async with await described.build() as model:
            # the lower, the less the text surprises the model
            logits, tokens = await model.send_raw_chat_request("Paris is the capital of France.")
            loss = cross_entropy_loss(logits[0][:-1], tokens[1:])
            print(f"{name} the importance matrix: {loss:.4f} nats a token")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1], model_path(argument=2)))
