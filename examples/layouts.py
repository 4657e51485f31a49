"""One matrix product cut over all ranks: values, gradients and communication, next to the same product on one device.

torchrun --standalone --nproc-per-node 2 examples/layouts.py
"""

import torch
import torch.nn.functional as F

import hyper_parallel as hp


def main() -> None:
    platform = hp.get_platform()
    platform.init_process_group()
    mesh = hp.init_device_mesh("cpu", (platform.get_world_size(),), mesh_dim_names=("tp",))

    torch.manual_seed(0)
    x, up, down = (torch.randn(shape, dtype=torch.float64) for shape in ((5, 6), (8, 6), (6, 8)))

    def forward(x, up, down):  # plain single-device code
        return F.linear(F.linear(x, up).relu(), down).square().sum()

    cut_x = hp.distribute_tensor(x, mesh, [hp.Replicate()]).requires_grad_()
    cut_up = hp.distribute_tensor(up, mesh, [hp.Shard(0)]).requires_grad_()
    cut_down = hp.distribute_tensor(down, mesh, ("None", "tp")).requires_grad_()  # the other spelling
    with hp.CommRecorder() as recorder:
        loss = forward(cut_x, cut_up, cut_down)
        loss.backward()

    whole = [tensor.requires_grad_() for tensor in (x, up, down)]
    expected = forward(*whole)
    expected.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    for mine, want in zip((cut_x, cut_up, cut_down), whole, strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), want.grad)
    if platform.get_rank() == 0:
        print(recorder.table())
        print(hp.explain(cut_up.layout, cut_up.layout.replicated(), tuple(cut_up.shape)))
    platform.destroy_process_group()


if __name__ == "__main__":
    main()
