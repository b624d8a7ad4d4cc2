"""Serve replicas of a model with Ray, and ask them: `python ray_serve.py [MODEL]`.

Needs `pip install 'mistralrs_sdk[ray]'`. Without a cluster to join, Ray starts one on this machine.
"""

import json
import urllib.request

import ray
from demo_model import model_path
from ray import serve

from mistralrs_sdk import ModelBuilder
from mistralrs_sdk.integrations.ray_serve import deployment

COUNTRIES = ("France", "Italy", "Japan", "Egypt")


def ask(country: str) -> str:
    question = f"What is the capital of {country}?"
    body = {"messages": question, "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        "http://127.0.0.1:8000/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json", "x-session-id": country},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def main(path: str) -> None:
    ray.init(include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    served = deployment(
        ModelBuilder(path), num_replicas=2, num_cpus=0.5, session_affinity=True
    )  # on GPUs: num_gpus=1
    serve.run(served.bind())
    status = serve.status().applications["default"].deployments["mistralrs"]
    print(f"{sum(status.replica_states.values())} replicas, {status.status.value}")
    for country in COUNTRIES:
        print(f"{country}: {ask(country)}")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(model_path())
