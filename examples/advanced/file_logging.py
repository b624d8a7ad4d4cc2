"""Write the package's log to a file: `python file_logging.py [MODEL]`.

The log is Python's own, under the name "mistralrs_sdk"; `with_logging()` would send it to standard
error, at the level that RUST_LOG says.
"""

import asyncio
import logging
import tempfile
from pathlib import Path

from demo_model import model_path

from mistralrs_sdk import ModelBuilder, RequestBuilder


async def main(path: str) -> None:
    file = Path(tempfile.gettempdir()) / "mistralrs_sdk_example.log"
    handler = logging.FileHandler(file, mode="w", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("mistralrs_sdk")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        async with await ModelBuilder(path).build() as model:
            request = RequestBuilder().add_message("user", "What is the capital of France?")
            # the demo model does not think: a warning says that this has no effect
            response = await model.send_chat_request(request.enable_thinking(True))
            print(response.choices[0].message.content)
    finally:
        logger.removeHandler(handler)
        handler.close()
    print(f"{file} holds:")
    print(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    asyncio.run(main(model_path()))
