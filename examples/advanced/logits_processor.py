"""Change what may come next by functions of your own: `python logits_processor.py [MODEL]`."""

import asyncio
from collections.abc import Sequence

import torch
from demo_model import model_path
from torch import Tensor

from mistralrs_sdk import ModelBuilder, RequestBuilder


class Without:
    """Forbids tokens; a processor may be any object that can be called."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)

    def __call__(self, logits: Tensor, ids: Sequence[int]) -> Tensor:
        logits[self.ids] = -torch.inf
        return logits


async def main(path: str) -> None:
    request = RequestBuilder().add_message("user", "What is the capital of France?")
    async with await ModelBuilder(path).build() as model:
        paris = await model.tokenize(" Paris", add_special_tokens=False)
        (mark,) = await model.tokenize("!", add_special_tokens=False)

        def loud(logits: Tensor, ids: Sequence[int]) -> Tensor:
            """Like exclamation marks, but not two in a row; `ids` is the text so far."""
            logits[mark] += -torch.inf if ids[-1] == mark else 8
            return logits

        request = request.set_sampler_max_len(24)
        variants = {
            "as it is": request,
            "without Paris": request.add_logits_processor(Without(paris[:1])),
            "loud": request.add_logits_processor(loud),
        }
        answers = await asyncio.gather(*map(model.send_chat_request, variants.values()))
    for name, answer in zip(variants, answers, strict=True):
        print(f"{name}: {answer.choices[0].message.content}")


if __name__ == "__main__":
    asyncio.run(main(model_path()))
