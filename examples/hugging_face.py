"""Hugging Face's Llama, unmodified, trained under degrees that are an argument: the same losses on any number of ranks.

Usage: torchrun --nproc-per-node 4 examples/hugging_face.py "dp_shard=2, tp=2" folder
Without a folder nothing is written; from one that a run has written the next one goes on, under any degrees.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel as hp

TINY = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def main(degrees: str = "", folder: str | None = None) -> None:
    place = hp.launch.join()
    weights = Path(folder, "weights") if folder and Path(folder, "weights").exists() else None
    config = AutoConfig.from_pretrained(weights) if weights else AutoConfig.for_model("llama", **TINY)
    with hp.deferred_init():
        model = AutoModelForCausalLM.from_config(config)
    run = hp.parallelize(model, degrees, microbatches=2, recompute="full")
    run.load_hugging_face(weights) if weights else run.materialize(seed=0)  # each rank only its bytes
    optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2)

    rows = torch.randint(97, (32, 17), generator=torch.Generator().manual_seed(0))
    for epoch in range(2):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
        for samples in order.split(12):  # numbers of the whole batch, equal on every rank; the last batch has 8
            mine = rows[run.mine(samples)]
            loss = run.forward_backward(input_ids=mine, labels=mine)
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if place.rank == 0:
                print(f"step {run.step} loss {loss.item():.5f}")

    if folder:
        run.save(Path(folder, "checkpoint"), optimizer=optimizer)
        run.save_hugging_face(Path(folder, "weights"))  # from_pretrained opens it
    hp.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
