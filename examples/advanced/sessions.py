"""Let the model keep conversations, copy them and store them: `python sessions.py [MODEL]`."""

import asyncio
import json

from demo_model import model_path

from mistralrs_sdk import Model, ModelBuilder, RequestBuilder


async def ask(model: Model, session_id: str, text: str) -> None:
    """Send only what is new: the turns before it are in the session."""
    request = RequestBuilder().add_message("user", text).with_session_id(session_id)
    response = await model.send_chat_request(request.set_sampler_max_len(16))
    cached, prompt = response.usage.cached_tokens, response.usage.prompt_tokens
    print(f"{session_id}: {response.choices[0].message.content}  ({cached} of {prompt} cached)")


async def main(path: str) -> None:
    async with await ModelBuilder(path).with_sessions(10, idle_seconds=600).build() as model:
        await ask(model, "anna", "My name is Anna. What is the capital of France?")
        model.fork_session("anna", new_session_id="copy")
        await ask(model, "anna", "What is my name?")
        await ask(model, "copy", "And the capital of Japan?")

        stored = json.dumps(model.export_session("anna").to_dict())
        model.delete_session("anna")
        model.import_session("restored", json.loads(stored))
        print(f"sessions: {model.list_session_ids()}")
        for message in model.export_session("restored").messages:
            print(f"  {message['role']}: {message['content']}")


if __name__ == "__main__":
    asyncio.run(main(model_path()))
