"""Let the model call the tools of an MCP server: `python mcp_client.py [MODEL]`.

Needs the extra: `pip install "mistralrs_sdk[mcp]"`.
"""

import asyncio
import sys
from pathlib import Path

from demo_model import model_path

from mistralrs_sdk import (
    McpClientConfig,
    McpServerConfig,
    McpServerSource,
    ModelBuilder,
    RequestBuilder,
    ToolChoice,
)

TEMPLATE = Path(__file__).with_name("hermes.jinja")  # the demo model's own has no tools
SERVER = Path(__file__).with_name("mcp_server.py")


async def main(path: str) -> None:
    # for a server on the net: McpServerSource.Http("https://...")
    library = McpServerSource.Process(sys.executable, [str(SERVER)])
    config = McpClientConfig(servers=[McpServerConfig(name="library", source=library)])
    builder = ModelBuilder(path).with_chat_template(TEMPLATE).with_mcp_client(config)
    request = (
        RequestBuilder()
        .add_message("user", "When is the library open on Monday?")
        .set_tool_choice(ToolChoice.named("library_opening_hours"))  # AUTO lets the model decide
        .with_max_tool_rounds(1)
        .set_sampler_max_len(64)
    )
    async with await builder.build() as model:
        for tool in model.list_mcp_tools():
            print(f"{tool.name}: {tool.description}")

        response = await model.send_chat_request(request)
        for record in response.agentic_tool_calls or ():
            print(f"{record.name}({record.arguments}) gave {record.result_content}")
        print(response.choices[0].message.content)


if __name__ == "__main__":
    asyncio.run(main(model_path()))
