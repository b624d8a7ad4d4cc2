"""Ask one question: `python text_generation.py [MODEL]`."""

import asyncio

from demo_model import model_path

from mistralrs_sdk import ModelBuilder, TextMessageRole, TextMessages


async def main(path: str) -> None:
    async with await ModelBuilder(path).build() as model:
        print(await model.chat("What is the capital of France?"))

        messages = (
            TextMessages()
            .add_message(TextMessageRole.SYSTEM, "You answer in one short sentence.")
            .add_message(TextMessageRole.USER, "Who wrote Hamlet?")
        )
        response = await model.send_chat_request(messages)
        print(response.choices[0].message.content)
        print(f"{response.usage.avg_compl_tok_per_sec:.1f} tokens per second")


if __name__ == "__main__":
    asyncio.run(main(model_path()))
