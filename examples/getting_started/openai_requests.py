"""Send requests as OpenAI's API spells them: `python openai_requests.py [MODEL]`."""

import asyncio
import json

from demo_model import model_path

from mistralrs_sdk import ModelBuilder


async def main(path: str) -> None:
    async with await ModelBuilder(path).build() as model:
        messages = [{"role": "user", "content": "What is the capital of Japan?"}]
        response = await model.send_chat_request(
            {"messages": messages, "max_tokens": 16, "temperature": 0, "logprobs": True}
        )
        choice = response.to_dict()["choices"][0]
        print(json.dumps(choice["message"]))
        for token in choice["logprobs"]["content"][:3]:
            print(f"{token['token']!r} {token['logprob']:.2f}")

        messages += [choice["message"], {"role": "user", "content": "Of Peru?"}]
        body = {"messages": messages, "max_tokens": 16, "temperature": 0, "stream": True}
        async with await model.stream_chat_request(body) as stream:
            async for chunk in stream:
                print(json.dumps(chunk.to_dict()["choices"][0]["delta"]))


if __name__ == "__main__":
    asyncio.run(main(model_path()))
