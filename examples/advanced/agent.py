"""An agent calls tools until it has an answer: `python agent.py [MODEL]`."""

import asyncio
from pathlib import Path

from demo_model import model_path

from mistralrs_sdk import AgentBuilder, ModelBuilder, RequestBuilder, ToolChoice, tool

TEMPLATE = Path(__file__).with_name("hermes.jinja")  # the demo model's own has no tools


@tool(description="Look up the weather in a city.", strict=True)
async def weather(city: str) -> str:
    await asyncio.sleep(0.01)  # a service on the net, say
    return f"It rains in {city}."


async def main(path: str) -> None:
    async with await ModelBuilder(path).with_chat_template(TEMPLATE).build() as model:
        agent = (
            AgentBuilder(model)
            .with_system_prompt("You answer in one short sentence.")
            .with_tool(weather)
            .with_tool_choice(
                ToolChoice.named(weather.tool)
            )  # at first; AUTO lets the model decide
            .with_max_iterations(2)
            .build()
        )
        question = RequestBuilder().add_message("user", "What is the weather in Oslo?")
        response = await agent.run(question.set_sampler_max_len(48))

    for number, step in enumerate(response.steps, start=1):
        for call, result in zip(step.tool_calls, step.tool_results, strict=True):
            print(f"{number}. {call.function.name}({call.function.arguments}): {result.result}")
    print(f"{response.stop_reason.kind} after {response.iterations} answers")
    print(response.final_response)


if __name__ == "__main__":
    asyncio.run(main(model_path()))
