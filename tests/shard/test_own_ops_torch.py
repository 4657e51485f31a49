"""Rules for operators of torch.library."""

import torch

import hyper_parallel as hp
from tests.shard.validator import tensor
from tests.world import run_on_ranks


@run_on_ranks(2)
def test_a_library_operator_gets_a_rule() -> None:
    @torch.library.custom_op("hyper_parallel_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(lambda x: torch.empty_like(x))
    hp.register_op("ab->ab")(torch.ops.hyper_parallel_test.twice)
    x = hp.distribute_tensor(tensor(5, 3), hp.init_device_mesh("cpu", (2,)), [hp.Shard(0)])
    out = torch.ops.hyper_parallel_test.twice(x)
    assert out.placements == (hp.Shard(0),)
    torch.testing.assert_close(out.full_tensor(), tensor(5, 3) * 2)
