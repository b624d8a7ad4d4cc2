"""Send many requests at once; they share the steps of one engine: `python batching.py [MODEL]`."""

import asyncio
import time

from demo_model import model_path

from mistralrs_sdk import ModelBuilder, RequestBuilder, TextMessageRole

COUNTRIES = ("France", "Italy", "Japan", "Egypt", "Peru", "Norway", "India", "Spain")


def request_about(country: str) -> RequestBuilder:
    question = f"What is the capital of {country}?"
    return RequestBuilder().add_message(TextMessageRole.USER, question).set_sampler_max_len(16)


async def main(path: str) -> None:
    async with await ModelBuilder(path).with_max_num_seqs(len(COUNTRIES)).build() as model:
        start = time.perf_counter()
        responses = await asyncio.gather(
            *(model.send_chat_request(request_about(country)) for country in COUNTRIES)
        )
        seconds = time.perf_counter() - start

    for country, response in zip(COUNTRIES, responses, strict=True):
        print(f"{country}: {response.choices[0].message.content}")
    tokens = sum(response.usage.completion_tokens for response in responses)
    print(f"{tokens / seconds:.1f} tokens per second, all requests together")


if __name__ == "__main__":
    asyncio.run(main(model_path()))
