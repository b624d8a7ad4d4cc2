"""A conversation in the terminal: `python multiturn.py [MODEL]`.

An empty line forgets what was said; the end of the input (Ctrl-D) ends it.
"""

import asyncio

from demo_model import model_path

from mistralrs_sdk import Model, ModelBuilder, RequestBuilder, TextMessageRole

START = (
    RequestBuilder()
    .add_message(TextMessageRole.SYSTEM, "You are friendly and answer in one short sentence.")
    .set_sampler_temperature(0.2)
    .set_sampler_seed(1)
    .set_sampler_max_len(200)
)


async def answer(model: Model, conversation: RequestBuilder) -> RequestBuilder:
    """Print the answer while it comes; returns the conversation with it."""
    async with await model.stream_chat_request(conversation) as stream:
        async for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        # the same answer once more, whole
        response = await stream.collect()
    usage = response.usage
    print(f"\n({usage.cached_tokens} of {usage.prompt_tokens} prompt tokens were cached)")
    return conversation.add_message(TextMessageRole.ASSISTANT, response.choices[0].message.content)


async def main(path: str) -> None:
    async with await ModelBuilder(path).build() as model:
        conversation = START
        while True:
            try:
                said = await asyncio.to_thread(input, "> ")
            except EOFError:
                return
            if said:
                conversation = conversation.add_message(TextMessageRole.USER, said)
                conversation = await answer(model, conversation)
            else:
                conversation = START


if __name__ == "__main__":
    asyncio.run(main(model_path()))
