"""A chat model for LangChain in this process: `python langchain_chat.py [MODEL]`.

Needs `pip install 'mistralrs_sdk[langchain]'`.
"""

from pathlib import Path
from typing import Literal

from demo_model import model_path
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from pydantic import BaseModel

from mistralrs_sdk import BlockingModel, ModelBuilder
from mistralrs_sdk.integrations.langchain import ChatMistralRs

TEMPLATE = Path(__file__).with_name("hermes.jinja")  # the demo model's own has no tools


class Place(BaseModel, extra="forbid"):
    country: Literal["France", "Japan", "Peru"]
    is_a_capital: bool


@tool
def population(city: Literal["Paris", "Tokyo", "Lima"]) -> str:
    """How many people live in a city."""
    return {"Paris": "2.1 million", "Tokyo": "14 million", "Lima": "10.1 million"}[city]


def main(path: str) -> None:
    builder = ModelBuilder(path).with_chat_template(TEMPLATE)
    # plain code and coroutines can use it; a Model, built with `await`, is for coroutines only
    with BlockingModel.from_builder(builder) as model:
        chat = ChatMistralRs(model=model, temperature=0, max_tokens=64)

        chain = (
            ChatPromptTemplate.from_messages([("user", "What is the capital of {where}?")]) | chat
        )
        for message in chain.batch([{"where": "France"}, {"where": "Japan"}]):  # in one batch
            print(message.content)

        # the answer is held to the schema
        print(repr(chat.with_structured_output(Place).invoke("Where is Paris?")))

        # the call is required: the demo model needs that, others decide by themselves
        question = HumanMessage("How many people live in Lima?")
        asking = chat.bind_tools([population], tool_choice="population", strict=True)
        called = asking.invoke([question])
        results = [population.invoke(call) for call in called.tool_calls]
        print(called.tool_calls[0]["args"], results[0].content)
        print(chat.invoke([question, called, *results]).content)

        for chunk in chat.stream("What is the plural of cat?"):
            print(chunk.content, end="", flush=True)
        print()


if __name__ == "__main__":
    main(model_path())
