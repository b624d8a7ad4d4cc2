"""An agent of Pydantic AI on a model in this process: `python pydantic_ai_agent.py [MODEL]`.

Needs `pip install 'mistralrs_sdk[pydantic-ai]'`.
"""

import asyncio
from pathlib import Path
from typing import Literal

from demo_model import model_path
from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, RunContext

from mistralrs_sdk import ModelBuilder
from mistralrs_sdk.integrations.pydantic_ai import MistralRsModel

TEMPLATE = Path(__file__).with_name("hermes.jinja")  # the demo model's own has no tools


class Place(BaseModel, extra="forbid"):
    country: Literal["France", "Japan", "Peru"]
    is_a_capital: bool


def population(city: Literal["Paris", "Tokyo", "Lima"]) -> str:
    """How many people live in a city."""
    return {"Paris": "2.1 million", "Tokyo": "14 million", "Lima": "10.1 million"}[city]


def call_first(context: RunContext) -> ModelSettings:
    """The demo model must be told to call; others decide by themselves, without this."""
    return ModelSettings(tool_choice=["population"] if context.run_step == 1 else "none")


async def main(path: str) -> None:
    async with await ModelBuilder(path).with_chat_template(TEMPLATE).build() as model:
        here = MistralRsModel(model, settings=ModelSettings(temperature=0, max_tokens=64))

        # the answer is held to the schema
        located = await Agent(here, output_type=Place).run("Where is Paris?")
        print(repr(located.output))

        agent = Agent(here, tools=[population], model_settings=call_first)
        answer = await agent.run("How many people live in Lima?")
        for message in answer.all_messages():
            for part in message.parts:
                print(f"{part.part_kind}: {getattr(part, 'args', None) or part.content}")

        async with Agent(here).run_stream("What is the plural of cat?") as stream:
            async for text in stream.stream_text(delta=True, debounce_by=None):
                print(text, end="", flush=True)
        print(f"\n{stream.usage.output_tokens} tokens")


if __name__ == "__main__":
    asyncio.run(main(model_path()))
