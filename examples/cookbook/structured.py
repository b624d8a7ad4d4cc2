"""Read typed values out of a text: `python structured.py [MODEL]`.

The answer is held to the type's JSON schema, so that it can always be read.
"""

import asyncio
import enum
from dataclasses import dataclass

from demo_model import model_path

from mistralrs_sdk import InferenceError, ModelBuilder, RequestBuilder


class Priority(enum.Enum):
    LOW = "low"
    HIGH = "high"


@dataclass
class Ticket:
    """A pydantic model, an attrs class or a TypedDict does as well."""

    customer: str
    product: str
    priority: Priority
    refund: bool


LETTERS = (
    "Ann Lee writes: my coffee machine is broken, please help me at once!",
    "Bob Ray writes: the lamp arrived in the wrong colour. I want my money back, no hurry.",
)


async def main(path: str) -> None:
    async with await ModelBuilder(path).build() as model:
        for letter in LETTERS:
            request = (
                RequestBuilder()
                .add_message("system", "Extract customer, product, priority and refund as JSON.")
                .add_message("user", letter)
                .set_sampler_max_len(80)
            )
            try:
                ticket = await model.generate_structured(Ticket, request)
            except InferenceError as error:  # cut short, for example
                print(f"no ticket: {error}")
            else:
                print(ticket)


if __name__ == "__main__":
    asyncio.run(main(model_path()))
