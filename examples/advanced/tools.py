"""Execute the calls of tools yourself: `python tools.py [MODEL]`."""

import asyncio
import json
from pathlib import Path

from demo_model import model_path

from mistralrs_sdk import Function, ModelBuilder, RequestBuilder, TextMessageRole, Tool, ToolChoice

# the demo model's own template has no place for tools; models made for tools need no other
TEMPLATE = Path(__file__).with_name("hermes.jinja")

POPULATION = Tool(
    Function(
        "population",
        "How many people live in a city, in millions.",
        {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
        strict=True,
    )
)
MILLIONS = {"Paris": 2.1, "Tokyo": 14.0, "Lima": 10.1}


def population(city: str) -> str:
    return f"{MILLIONS[city]} million" if city in MILLIONS else f"unknown city {city!r}"


async def main(path: str) -> None:
    question = "How many people live in Paris?"
    request = (
        RequestBuilder()
        .add_message(TextMessageRole.USER, question)
        .set_tools([POPULATION])
        .set_tool_choice(ToolChoice.named(POPULATION))  # AUTO lets the model decide
        .set_sampler_max_len(64)
    )
    async with await ModelBuilder(path).with_chat_template(TEMPLATE).build() as model:
        message = (await model.send_chat_request(request)).choices[0].message

        calls = message.tool_calls or ()
        request = request.add_message_with_tool_call(
            TextMessageRole.ASSISTANT, message.content, calls
        )
        for call in calls:
            result = population(**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) is {result}")
            request = request.add_tool_message(result, call.id)

        response = await model.send_chat_request(request.set_tool_choice(ToolChoice.NONE))
        print(response.choices[0].message.content)


if __name__ == "__main__":
    asyncio.run(main(model_path()))
