"""Ask somebody before a tool runs: `python approval.py [MODEL]`."""

import asyncio
from pathlib import Path

from demo_model import model_path

from mistralrs_sdk import (
    AgentToolApproval,
    AgentToolApprovalDecision,
    ModelBuilder,
    RequestBuilder,
    ToolChoice,
)

TEMPLATE = Path(__file__).with_name("hermes.jinja")  # the demo model's own has no tools


def delete(file: str) -> str:
    """Delete a file."""
    return f"{file} is gone"


def approve(asked: AgentToolApproval) -> AgentToolApprovalDecision:
    print(f"{asked.tool.label}({asked.arguments}): denied")
    # or .approve(), or .approve_for_session() so as not to be asked again
    return AgentToolApprovalDecision.deny("This file is needed.")


async def main(path: str) -> None:
    request = (
        RequestBuilder()
        .add_message("user", "Delete the file notes.txt.")
        .set_tool_choice(ToolChoice.named("delete"))
        .with_agent_approval_callback(approve)
        .with_max_tool_rounds(1)
        .set_sampler_max_len(40)
    )
    builder = ModelBuilder(path).with_chat_template(TEMPLATE).with_tool(delete)
    async with await builder.build() as model:
        response = await model.send_chat_request(request)

    for record in response.agentic_tool_calls or ():
        print(f"the model was told: {record.result_content}")
    print(f"its answer: {response.choices[0].message.content}")


if __name__ == "__main__":
    asyncio.run(main(model_path()))
