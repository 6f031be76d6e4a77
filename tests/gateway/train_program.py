"""A tenant's program, with nothing but the tinker SDK: trains, saves, resumes, samples, and prints what it saw as JSON.

python train_program.py URL KEY STEPS SEED

After each step it waits for a line, or for the end, of its input.
"""

from __future__ import annotations

import json
import os
import sys

import tinker
from tinker import types


def batch(number: int) -> list[types.Datum]:
    """Two next-token sequences, others at each step."""
    data = []
    for row in range(2):
        tokens = [3 + (number * 7 + row * 11 + position * (row + 2)) % 40 for position in range(13)]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 12}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


def main(url: str, key: str, steps: int, seed: int) -> dict[str, object]:
    service = tinker.ServiceClient(base_url=url, api_key=key)
    model = tinker.RestClient(base_url=url, api_key=key).get_server_capabilities().result().supported_models[0].model_name
    training = service.create_lora_training_client(base_model=model, rank=4, seed=seed).result()
    losses = []
    for number in range(steps):
        forward = training.forward_backward(batch(number), "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=0.01))
        losses.append(forward.result().metrics["loss:sum"])
        step.result()
        print(f"step {number}", file=sys.stderr, flush=True)
        sys.stdin.readline()
    saved = training.save_state("end").result().path
    resumed = service.create_training_client_from_state_with_optimizer(saved).result()
    losses.append(resumed.forward(batch(0), "cross_entropy").result().metrics["loss:sum"])
    sampler = training.save_weights_and_get_sampling_client()
    sampler = sampler.result() if hasattr(sampler, "result") else sampler
    params = types.SamplingParams(max_tokens=5, seed=seed)
    samples = [
        list(sampler.sample(types.ModelInput.from_ints([5, 9, number]), num_samples=1, sampling_params=params).result().sequences[0].tokens)
        for number in range(3, 6)
    ]
    return {"losses": losses, "samples": samples, "model_id": training.model_id}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))), flush=True)
    os._exit(0)  # the SDK's background threads are none of ours
