"""Watch an agent work: `python agent_streaming.py [MODEL]`."""

import asyncio
from pathlib import Path

from demo_model import model_path

from mistralrs_sdk import (
    AgentBuilder,
    AgentComplete,
    AgentTextDelta,
    AgentToolCallsStart,
    ModelBuilder,
    RequestBuilder,
    ToolChoice,
    ToolResult,
)

TEMPLATE = Path(__file__).with_name("hermes.jinja")  # the demo model's own has no tools


def population(city: str) -> str:
    """How many people live in a city."""
    millions = {"Lima": 10.1, "Paris": 2.1, "Tokyo": 14.0}
    if city not in millions:
        raise ValueError(f"no city is called {city}")  # this is what the model is told then
    return f"{millions[city]} million people live in {city}"


async def main(path: str) -> None:
    question = (
        RequestBuilder()
        .add_message("user", "How many people live in Lima?")
        .set_sampler_max_len(48)
    )
    async with await ModelBuilder(path).with_chat_template(TEMPLATE).build() as model:
        agent = (
            AgentBuilder(model)
            .with_tool(population)
            .with_tool_choice(ToolChoice.named("population"))
        )
        # leaving early, with break for example, stops the answer and cancels the tools
        async with agent.with_max_iterations(2).build().run_stream(question) as events:
            async for event in events:
                match event:
                    case AgentTextDelta(text):
                        print(text, end="", flush=True)
                    case AgentToolCallsStart(tool_calls=calls):
                        print(f"calling {', '.join(call.function.name for call in calls)}")
                    case ToolResult(tool_name=name, result=result, error=None):
                        print(f"{name} gave {result}")
                    case ToolResult(tool_name=name, error=error):
                        print(f"{name} failed: {error}")
                    case AgentComplete(response=response):
                        print(f"\n{response.stop_reason.kind}")


if __name__ == "__main__":
    asyncio.run(main(model_path()))
