"""Hold an answer to a JSON schema: `python json_schema.py [MODEL]`."""

import asyncio
import json

from demo_model import model_path

from mistralrs_sdk import Constraint, ModelBuilder, RequestBuilder

SCHEMA = {
    "type": "object",
    "properties": {
        "country": {"type": "string", "maxLength": 20},
        "capital": {"type": "string", "maxLength": 20},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe", "Oceania"]},
        "coast": {"type": "boolean"},
    },
    "required": ["country", "capital", "continent", "coast"],
    "additionalProperties": False,
}


async def main(path: str) -> None:
    request = (
        RequestBuilder()
        .add_message("user", "Describe France as JSON: country, capital, continent, coast.")
        .set_constraint(Constraint.JsonSchema(SCHEMA))
        .set_sampler_max_len(100)
    )
    async with await ModelBuilder(path).build() as model:
        # "length" as finish_reason would mean that the JSON was cut short
        choice = (await model.send_chat_request(request)).choices[0]
    text = choice.message.content or ""
    print(text)
    print(f"{choice.finish_reason}: the capital is {json.loads(text)['capital']}")


if __name__ == "__main__":
    asyncio.run(main(model_path()))
