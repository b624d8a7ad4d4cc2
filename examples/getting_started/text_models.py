"""Run any text model and show what it thinks before it answers: `python text_models.py [MODEL]`.

MODEL is a Hugging Face id ("Qwen/Qwen3-0.6B" thinks), a folder or a GGUF file; the model's own
files say what it is and how its thoughts are marked.
"""

import asyncio

from demo_model import model_path

from mistralrs_sdk import ModelBuilder, TextMessageRole, TextMessages


async def main(path: str) -> None:
    async with await ModelBuilder(path).build() as model:
        print(model)
        messages = TextMessages().add_message(
            TextMessageRole.USER, "Which is larger, the Sun or the Moon?"
        )
        # .enable_thinking(False) or .with_reasoning_effort("low") if the template knows them
        message = (await model.send_chat_request(messages)).choices[0].message
        if message.reasoning_content:
            print(f"Thought: {message.reasoning_content}")
        print(f"Answer: {message.content}")


if __name__ == "__main__":
    asyncio.run(main(model_path()))
