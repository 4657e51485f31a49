"""What a step of the reference Llama sends under each degree: closed forms in the number of blocks and parts."""

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.testing import threads
from tests.parallel.layouts import LAYOUTS

GATHER, REDUCE, SUM, MOVE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single"
# Every block is larger than the smallest unit, so each is one; the rest of the model is another.
SIZES = {"vocab_size": 37, "dim": 192, "num_heads": 4, "num_kv_heads": 4, "hidden_dim": 300, "max_length": 16}


def _counts(degrees, blocks, parts, sequence_parallel=True):
    torch.manual_seed(0)
    model = hp.models.Llama(hp.models.LlamaConfig(num_blocks=blocks, **SIZES))
    run = hp.parallelize(model, degrees, microbatches=parts, sequence_parallel=sequence_parallel, attention="gather")
    ids = torch.randint(37, (4, 9))
    for recorded in (False, True):  # the first step learns the order of the units
        run.zero_grad()
        with hp.CommRecorder() as recorder:
            run.forward_backward(ids[:, :-1], labels=ids[:, 1:])
        if recorded:
            return dict(recorder.counts)


def _expected(degrees, blocks, parts):
    """Collectives by kind.

    All: the number of targets, and the loss where ranks have rows of their own. Units (one for each block, one for the
    rest): gathered in forward and again in backward but for the last and the root; reduced once. Tensor parallelism
    with the sequence sharded: a reduce-scatter behind the embedding and each half of a block, a gather into each half
    and the head, as many in backward; each norm's gradient is summed, and the loss over the vocabulary takes three
    sums. Context parallelism: keys and values of each block are gathered and their gradients scattered; logits, labels
    and the gradient of the logits move from tokens to rows by the model's flatten, and the loss over rows takes three
    sums; token ids are checked together. Nothing for parameters besides units.
    """
    sizes = hp.Degrees(**{"dp_shard": 1, **_parsed(degrees)}).sizes
    units, halves = blocks + 1, 2 * blocks
    found = {SUM: 1, GATHER: 0, REDUCE: 0, MOVE: 0}
    if sizes["dp_replicate"] * sizes["dp_shard"] > 1:
        found[SUM] += 1
    if sizes["dp_shard"] * sizes["cp"] > 1:
        found[GATHER] += parts * (units + units - 2)
        found[REDUCE] += parts * units
    if sizes["dp_replicate"] > 1:
        found[SUM] += units  # once a step, whatever the number of parts
    if sizes["tp"] > 1:
        found[GATHER] += parts * 2 * (halves + 1)
        found[REDUCE] += parts * 2 * (halves + 1)
        found[SUM] += parts * (3 + halves + 1)
    if sizes["cp"] > 1:
        found[GATHER] += parts * 2 * blocks
        found[REDUCE] += parts * 2 * blocks
        found[MOVE] += parts * 3
        found[SUM] += parts * 4
    return {kind: count for kind, count in found.items() if count}


def _parsed(degrees):
    return {name: int(size) for name, size in (one.split("=") for one in degrees.split(", "))}


@pytest.mark.parametrize("degrees", [degrees for degrees in LAYOUTS if degrees not in ("dp_shard=1", "cp=2, tp=2")])
def test_collectives_of_a_step(degrees):
    for blocks, parts in ((2, 1), (3, 2)):
        got = threads(LAYOUTS[degrees]).run(_counts, degrees, blocks, parts)
        assert got == [_expected(degrees, blocks, parts)] * LAYOUTS[degrees], (blocks, parts)


def test_one_process_sends_nothing():
    assert threads(1).run(_counts, "dp_shard=1", 2, 2) == [{}]
