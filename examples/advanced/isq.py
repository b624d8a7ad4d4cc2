"""Quantise a model while it loads, and again while it runs: `python isq.py [MODEL]`.

On a CPU the demo model takes half a minute for that.
"""

import asyncio

from demo_model import model_path

from mistralrs_sdk import IsqType, Model, ModelBuilder, RequestBuilder


async def show(model: Model) -> None:
    """What the weights are now, and an answer."""
    line = next(line for line in model.describe().splitlines() if line.startswith("weights "))
    print(" ".join(line.split()))
    request = RequestBuilder().add_message("user", "What is the capital of France?")
    response = await model.send_chat_request(request.set_sampler_max_len(16))
    print(response.choices[0].message.content)


async def main(path: str) -> None:
    # with_auto_isq(4) takes the four-bit type that suits the device
    async with await ModelBuilder(path).with_isq(IsqType.HQQ4).build() as model:
        await show(model)
        # read again from the files, so that more bits bring back quality
        await model.re_isq_model(IsqType.Q8_0)
        await show(model)


if __name__ == "__main__":
    asyncio.run(main(model_path()))
