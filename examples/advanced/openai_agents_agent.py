"""An agent of OpenAI's Agents SDK, model in this process: `python openai_agents_agent.py [MODEL]`.

Needs `pip install 'mistralrs_sdk[openai-agents]'`.
"""

import asyncio
from pathlib import Path
from typing import Literal

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from demo_model import model_path
from pydantic import BaseModel

from mistralrs_sdk import ModelBuilder
from mistralrs_sdk.integrations.openai_agents import MistralRsModel

TEMPLATE = Path(__file__).with_name("hermes.jinja")  # the demo model's own has no tools

set_tracing_disabled(True)  # else runs are told to OpenAI, if there is a key


class Place(BaseModel, extra="forbid"):
    country: Literal["France", "Japan", "Peru"]
    is_a_capital: bool


@function_tool
def population(city: Literal["Paris", "Tokyo", "Lima"]) -> str:
    """How many people live in a city."""
    return {"Paris": "2.1 million", "Tokyo": "14 million", "Lima": "10.1 million"}[city]


async def main(path: str) -> None:
    async with await ModelBuilder(path).with_chat_template(TEMPLATE).build() as model:
        here = MistralRsModel(model)
        brief = ModelSettings(temperature=0, max_tokens=64)

        # the answer is held to the schema
        finder = Agent("Finder", model=here, output_type=Place, model_settings=brief)
        print(repr((await Runner.run(finder, "Where is Paris?")).final_output))

        # the first answer must call: the demo model needs that, others decide by themselves
        first = ModelSettings(temperature=0, max_tokens=64, tool_choice="population")
        counter = Agent("Counter", model=here, tools=[population], model_settings=first)
        result = await Runner.run(counter, "How many people live in Lima?")
        for item in result.new_items:
            print(
                f"{item.type}: {getattr(item.raw_item, 'arguments', getattr(item, 'output', ''))}"
            )
        print(result.final_output)

        talker = Agent("Talker", model=here, model_settings=brief)
        stream = Runner.run_streamed(talker, "What is the plural of cat?")
        async for event in stream.stream_events():
            if (
                event.type == "raw_response_event"
                and event.data.type == "response.output_text.delta"
            ):
                print(event.data.delta, end="", flush=True)
        print(f"\n{stream.context_wrapper.usage.output_tokens} tokens")


if __name__ == "__main__":
    asyncio.run(main(model_path()))
