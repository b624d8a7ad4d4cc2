"""Print an answer while it is made: `python streaming.py [MODEL]`."""

import asyncio

from demo_model import model_path

from mistralrs_sdk import ModelBuilder, RequestBuilder, TextMessageRole


async def main(path: str) -> None:
    request = (
        RequestBuilder()
        .add_message(TextMessageRole.USER, "Count to five.")
        .set_sampler_temperature(0.7)
        .set_sampler_seed(1)
        .set_sampler_max_len(32)
    )
    async with await ModelBuilder(path).build() as model:
        # leaving the stream early, with break for example, stops the request
        async with await model.stream_chat_request(request) as stream:
            async for chunk in stream:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()


if __name__ == "__main__":
    asyncio.run(main(model_path()))
