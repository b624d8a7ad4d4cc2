"""Let the model call Python functions by itself: `python tool_callback.py [MODEL]`."""

import asyncio
from pathlib import Path
from typing import Annotated, Literal

from demo_model import model_path

from mistralrs_sdk import (
    AgenticToolCallProgress,
    CalledFunction,
    ModelBuilder,
    RequestBuilder,
    ToolCallContext,
    ToolChoice,
)

TEMPLATE = Path(__file__).with_name("hermes.jinja")  # the demo model's own has no tools


def temperature(
    city: Annotated[str, "The city's name in English."],
    unit: Literal["celsius", "fahrenheit"] = "celsius",
) -> dict[str, object]:
    """The temperature in a city right now."""
    # a plain function runs on a worker thread, a coroutine function on the event loop
    return {"city": city, "degrees": 21 if unit == "celsius" else 70, "unit": unit}


def audit(call: CalledFunction, context: ToolCallContext) -> str:
    """A callback instead of a function: it gets the call as the model wrote it."""
    return f"round {context.round}: {call.name} was called with {call.arguments}"


async def main(path: str) -> None:
    builder = (
        ModelBuilder(path)
        .with_chat_template(TEMPLATE)
        .with_tool(temperature)
        .with_tool_callback("audit", audit)
        .with_tool_timeout(10)
    )
    request = (
        RequestBuilder()
        .add_message("user", "How warm is it in Paris?")
        .set_tool_choice(ToolChoice.named("temperature"))  # AUTO lets the model decide
        .with_max_tool_rounds(1)
        .set_sampler_max_len(64)
    )
    async with await builder.build() as model:
        # what tools do comes between the chunks of the answer
        async with await model.stream_chat_request(request) as stream:
            async for item in stream:
                if isinstance(item, AgenticToolCallProgress):
                    print(f"[{item.tool_name}: {item.phase}]")
                else:
                    print(item.choices[0].delta.content or "", end="", flush=True)
        print()
        for record in (await stream.collect()).agentic_tool_calls or ():
            print(f"{record.name}({record.arguments}) gave {record.result_content}")


if __name__ == "__main__":
    asyncio.run(main(model_path()))
