"""A Llama under degrees that are an argument: the same losses on any number of ranks; on MindSpore."""

import sys
from pathlib import Path

import mindspore
import numpy as np
from mindspore import Tensor
from mindspore.experimental import optim

import hyper_parallel as hp

TINY = hp.models.LlamaConfig(vocab_size=97, dim=32, num_blocks=2, num_heads=4, num_kv_heads=4, hidden_dim=64)


def main(degrees: str = "", folder: str | None = None) -> None:
    place = hp.launch.join()  # torchrun, srun, mpirun, msrun; started by nobody: a world of one
    with hp.deferred_init():
        model = hp.models.Llama(TINY)
    run = hp.parallelize(model, degrees, microbatches=2, recompute="full")
    run.materialize(seed=0)  # each rank only its bytes
    optimizer = optim.AdamW(run.parameters(), lr=1e-2)

    rows = np.random.RandomState(0).randint(97, size=(32, 17))
    order = hp.data.Order(len(rows), batch=12, seed=0, epochs=2)
    for samples in order:  # numbers of the whole batch, equal on every rank
        mine = Tensor(rows[run.mine(samples)], mindspore.int32)
        loss = run.forward_backward(mine[:, :-1], labels=mine[:, 1:])  # of the whole batch, equal on every rank
        run.clip_grad_norm_(1.0)
        optimizer(run.gradients())
        run.zero_grad()
        if place.rank == 0:
            print(f"step {run.step} loss {loss.item():.5f}")

    if folder:
        run.save(Path(folder, "checkpoint"), optimizer=optimizer, order=order.state())  # loads under any degrees
    hp.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
