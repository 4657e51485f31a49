"""Hugging Face's Llama, unmodified, under degrees that are an argument: the same losses on any number of ranks."""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel as hp

TINY = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def main(degrees: str = "", folder: str | None = None) -> None:
    place = hp.launch.join()  # torchrun, srun, mpirun; started by nobody: a world of one
    weights = Path(folder or "", "weights")
    config = AutoConfig.from_pretrained(weights) if weights.exists() else AutoConfig.for_model("llama", **TINY)
    with hp.deferred_init():
        model = AutoModelForCausalLM.from_config(config)
    run = hp.parallelize(model, degrees, microbatches=2, recompute="full")
    run.load_hugging_face(weights) if weights.exists() else run.materialize(seed=0)  # each rank only its bytes
    optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2)

    rows = torch.randint(97, (32, 17), generator=torch.Generator().manual_seed(0))
    order = hp.data.Order(len(rows), batch=12, seed=0, epochs=2)
    for samples in order:  # numbers of the whole batch, equal on every rank
        mine = rows[run.mine(samples)]
        loss = run.forward_backward(input_ids=mine, labels=mine)  # of the whole batch, equal on every rank
        run.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if place.rank == 0:
            print(f"step {run.step} loss {loss.item():.5f}")

    if folder:
        run.save(Path(folder, "checkpoint"), optimizer=optimizer, order=order.state())  # loads under any degrees
        run.save_hugging_face(weights)  # from_pretrained opens it
    hp.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
