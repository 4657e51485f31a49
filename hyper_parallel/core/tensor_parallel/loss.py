"""``loss_parallel``: cross entropy over a vocabulary that is cut, without gathering the logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hyper_parallel.core.shard.dispatching.mixing import implicit_replication


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, cross entropy takes logits that are cut over the classes with the plain targets of a single device.

    Let the last layer keep its output cut: ``ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)``.
    Of each row of logits a few numbers travel: its largest logit, the sum of its exponentials, the logit of its target
    and, with smoothed labels, the sum of its logits; backward sends nothing. Targets, class weights and other plain
    tensors are taken as whole: every rank has all of them. Everything that the loss can be asked for works: weights,
    ``ignore_index``, ``label_smoothing``, probabilities as targets, every reduction. Vocabularies need not divide.

    >>> import torch, hyper_parallel as hp
    >>> mesh = hp.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",), rank_list=(0,), init_backend=False)
    >>> logits = hp.distribute_tensor(torch.zeros(2, 4), mesh, [hp.Shard(1)])
    >>> with loss_parallel():
    ...     loss = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 3]))
    >>> round(loss.item(), 4)
    1.3863
    """
    with implicit_replication():
        yield
