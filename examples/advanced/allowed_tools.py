"""Offer tools and say which of them may be called this time: `python allowed_tools.py [MODEL]`."""

import asyncio
from pathlib import Path

from demo_model import model_path

from mistralrs_sdk import ModelBuilder, RequestBuilder, ToolChoice, tool_from_function

TEMPLATE = Path(__file__).with_name("hermes.jinja")  # the demo model's own has no tools


def get_time(city: str) -> str:
    """Get the time in a city."""
    return f"noon in {city}"


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"sunny in {city}"


CHOICES = {
    "only the weather": ToolChoice.allowed_tools([get_weather.__name__], "required"),
    "this one": ToolChoice.named(get_time.__name__),
    "none": ToolChoice.NONE,
}


async def main(path: str) -> None:
    request = (
        RequestBuilder()
        .add_message("user", "What is the weather in Oslo?")
        .set_tools([tool_from_function(get_time), tool_from_function(get_weather)])
        .set_sampler_max_len(48)
    )
    async with await ModelBuilder(path).with_chat_template(TEMPLATE).build() as model:
        answers = await asyncio.gather(
            *(model.send_chat_request(request.set_tool_choice(c)) for c in CHOICES.values())
        )
    for name, answer in zip(CHOICES, answers, strict=True):
        message = answer.choices[0].message
        calls = [f"{c.function.name}({c.function.arguments})" for c in message.tool_calls or ()]
        print(f"{name}: {', '.join(calls) or message.content}")


if __name__ == "__main__":
    asyncio.run(main(model_path()))
