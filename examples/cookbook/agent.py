"""An agent that reviews a Python file: `python agent.py [MODEL [FILE]]`.

Its tools read the file and find what can be found without a model. A model made for tools decides
itself what to look at; the small demo model is told to begin with the findings.
"""

import ast
import asyncio
import sys
from pathlib import Path

from demo_model import model_path

from mistralrs_sdk import (
    Agent,
    AgentBuilder,
    AgentTextDelta,
    Model,
    ModelBuilder,
    RequestBuilder,
    ToolChoice,
    ToolResult,
)

# the demo model's own template has no place for tools; models made for tools need no other
TEMPLATE = Path(__file__).resolve().parent.parent / "advanced" / "hermes.jinja"
RULES = "You review Python code. Name what should be better, in a few short sentences."


def reviewer(model: Model, file: Path) -> Agent:
    """An agent with tools for this file."""
    text = file.read_text(encoding="utf-8")
    functions = {
        node.name: node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }

    def findings() -> list[str]:
        """What is wrong in the file, as far as a program can tell."""
        bare = [name for name, node in functions.items() if ast.get_docstring(node) is None]
        return [f"the function {name} has no docstring" for name in bare] or ["nothing"]

    def source(function: str) -> str:
        """The source code of one function.

        Args:
            function: its name
        """
        return ast.get_source_segment(text, functions[function]) or ""

    return (
        AgentBuilder(model)
        .with_system_prompt(RULES)
        .with_tool(findings)
        .with_tool(source)
        .with_tool_choice(ToolChoice.named("findings"))
        .with_max_iterations(4)
        .build()
    )


async def main(path: str, file: Path) -> None:
    request = RequestBuilder().add_message("user", f"Review the file {file.name}.")
    async with await ModelBuilder(path).with_chat_template(TEMPLATE).build() as model:
        agent = reviewer(model, file)
        async with agent.run_stream(request.set_sampler_max_len(64)) as events:
            async for event in events:
                if isinstance(event, ToolResult):
                    print(f"[{event.tool_name}: {event.result or event.error}]")
                elif isinstance(event, AgentTextDelta):
                    print(event.text, end="", flush=True)
            print()
            response = await events.collect()
    print(f"{response.iterations} answers, {response.stop_reason.kind}")


if __name__ == "__main__":
    asyncio.run(main(model_path(), Path(sys.argv[2] if len(sys.argv) > 2 else __file__)))
