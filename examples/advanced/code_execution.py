"""Run Python that the model writes, in a sandbox and after asking: `python code_execution.py`."""

import asyncio
import sys
from pathlib import Path

from demo_model import model_path

from mistralrs_sdk import (
    AgentToolApproval,
    CodeExecutionConfig,
    ModelBuilder,
    NetworkMode,
    RequestBuilder,
    SandboxPolicy,
    ToolChoice,
)

TEMPLATE = Path(__file__).with_name("hermes.jinja")  # the demo model's own has no tools


def approve(asked: AgentToolApproval) -> bool:
    print(f"about to run: {asked.arguments}")
    return True  # a program for people would ask them here


async def main(path: str) -> None:
    config = CodeExecutionConfig(
        timeout_secs=10,
        # without a policy the code has all your rights
        sandbox_policy=SandboxPolicy(network=NetworkMode.NONE, max_memory_mb=512),
    )
    builder = ModelBuilder(path).with_chat_template(TEMPLATE).with_code_execution(config)
    request = (
        RequestBuilder()
        .add_message("user", "Use Python to print the sum of 1 and 2.")
        .with_code_execution()  # each request opts in
        .with_agent_approval_callback(approve)
        .set_tool_choice(ToolChoice.named("mistralrs_execute_python"))  # AUTO lets it decide
        .with_max_tool_rounds(1)
        .set_sampler_max_len(64)
    )
    async with await builder.build() as model:
        response = await model.send_chat_request(request)

    for record in response.agentic_tool_calls or ():
        print(f"it gave: {record.result_content}")
    print(f"answer: {response.choices[0].message.content}")


if __name__ == "__main__":
    if sys.platform != "linux":
        sys.exit("the model's code is run on Linux only")
    asyncio.run(main(model_path()))
