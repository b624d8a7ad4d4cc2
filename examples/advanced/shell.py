"""Run commands that the model writes, with a folder of scripts for them: `python shell.py`."""

import asyncio
import sys
import tempfile
from pathlib import Path

from demo_model import model_path

from mistralrs_sdk import ModelBuilder, RequestBuilder, SandboxPolicy, ShellConfig, ToolChoice

TEMPLATE = Path(__file__).with_name("hermes.jinja")  # the demo model's own has no tools


async def main(path: str, skill: Path) -> None:
    config = ShellConfig(timeout_secs=10, sandbox_policy=SandboxPolicy())
    builder = ModelBuilder(path).with_chat_template(TEMPLATE).with_shell_execution(config)
    request = (
        RequestBuilder()
        .add_message("user", "Run the command: sh skills/greeting/greet.sh Ada")
        # commands find a copy of the folder, and the model reads what it is for
        .with_shell_skill("greeting", "greet.sh NAME greets somebody", skill)
        .set_tool_choice(ToolChoice.named("mistralrs_execute_shell"))  # AUTO lets it decide
        .with_max_tool_rounds(1)
        .set_sampler_max_len(48)
    )
    async with await builder.build() as model:
        response = await model.send_chat_request(request)

    for record in response.agentic_tool_calls or ():
        print(f"{record.arguments} gave {record.result_content}")
    print(f"answer: {response.choices[0].message.content}")


if __name__ == "__main__":
    if sys.platform != "linux":
        sys.exit("the model's commands are run on Linux only")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "greet.sh").write_text('echo "Hello, $1!"\n', encoding="utf-8")
        asyncio.run(main(model_path(), Path(folder)))
