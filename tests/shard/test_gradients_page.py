"""The pictures of docs/gradients.md: each is computed on three ranks, with what it sends, and compared cell by cell."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hyper_parallel as hp
from tests.frameworks import backward, from_local, grad, grad_of, leaf, ours, theirs
from tests.frameworks.functions import linear
from tests.world import run_on_ranks

_PAGE = Path(__file__).parents[2] / "docs" / "gradients.md"
_WORDS = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "p2p_exchange": "exchange",
}
_REPLICATE, _PARTIAL = [hp.Replicate()], [hp.Partial()]

Rows = dict[str, Any]
_pictures: dict[str, Callable[[int], Rows]] = {}


def _picture(name: str) -> Callable[[Callable[[int], Rows]], Callable[[int], Rows]]:
    """The function computes the picture of that name: (rank) -> what this rank has in each row."""

    def register(compute: Callable[[int], Rows]) -> Callable[[int], Rows]:
        _pictures[name] = compute
        return compute

    return register


# ---------------------------------------------------------------- what the pictures are made of


def _tensor(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def _sent(recorder: hp.CommRecorder) -> str:
    return ", ".join(_WORDS[record.op] for record in recorder.records) or "nothing"


def _run(function: Callable[[Any], Any], values: Any, gradient: Any) -> Rows:
    """A function of plain tensors: its result, and the gradient of its input."""
    x = leaf(_tensor(values))
    with hp.CommRecorder() as forward:
        y = function(x)
    with hp.CommRecorder() as back:
        (found,) = grad((y,), (x,), (ours(_tensor(gradient)),))
    return {
        "forward": _sent(forward),
        "backward": _sent(back),
        "x": values,
        "y": theirs(y),
        "dL/dy": gradient,
        "dL/dx": theirs(found),
    }


def _mesh() -> hp.DeviceMesh:
    return hp.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))


def _dtensor(local: Any, placement: hp.Placement, needs_grad: bool = True) -> Any:
    made = from_local(_tensor(local), _mesh(), [placement])
    made.requires_grad = needs_grad
    return made


def _move(source: hp.Placement, target: hp.Placement, local: Any, gradient: Any) -> Rows:
    """A redistribution: ``gradient`` is this rank's block of the gradient of its result, as the law lays it out."""
    x = _dtensor(local, source)
    with hp.CommRecorder() as forward:
        y = x.redistribute(placements=[target])
    seed = from_local(ours(_tensor(gradient)), y.device_mesh, y.layout.gradient().placements)
    with hp.CommRecorder() as back:
        (found,) = grad((y,), (x,), (seed,))
    assert y.placements == (target,) and found.layout is x.layout.gradient()
    return {
        "forward": _sent(forward),
        "backward": _sent(back),
        "x": local,
        "y": theirs(y.to_local()),
        "dL/dy": gradient,
        "dL/dx": theirs(found.to_local()),
    }


# ---------------------------------------------------------------- the mistake


@_picture("the mistake")
def _(rank: int) -> Rows:
    platform, x = hp.get_platform(), ours(_tensor(rank + 1))

    def run(loss_of: Callable[[Any], Any]) -> tuple[Any, Any]:
        w = leaf(_tensor(2))
        loss = loss_of(w)
        return theirs(loss), theirs(grad((loss,), (w,))[0])

    def reduced(value: Any) -> Any:
        return platform.differentiable_all_reduce(value, "sum", None)

    loss, missing = run(lambda w: reduced(w * x))
    _, factor = run(lambda w: platform.vary(reduced(w * x), None))
    _, right = run(lambda w: reduced(platform.vary(w, None) * x))
    return {"w": 2, "x": rank + 1, "L": loss, "dL/dw, A": missing, "dL/dw, B": factor, "dL/dw, C": right}


# ---------------------------------------------------------------- collectives on plain tensors


@_picture("all-reduce")
def _(rank: int) -> Rows:
    return _run(lambda x: hp.get_platform().differentiable_all_reduce(x, "sum", None), [rank + 1], [10])


@_picture("all-reduce, other reductions")
def _(rank: int) -> Rows:
    rows: Rows = {}
    for op, value, gradient in (("avg", 3 * (rank + 1), 30), ("max", (2, 5, 5)[rank], 10), ("prod", rank + 2, 1)):
        ran = _run(lambda x, op=op: hp.get_platform().differentiable_all_reduce(x, op, None), [value], [gradient])
        for row in ("x", "y", "dL/dy", "dL/dx"):
            rows[f"{row}, {op}"] = ran[row]
    return rows


@_picture("vary")
def _(rank: int) -> Rows:
    return _run(lambda x: hp.get_platform().vary(x, None), [5], [rank + 1])


@_picture("all-gather, used whole")
def _(rank: int) -> Rows:
    platform = hp.get_platform()
    return _run(lambda x: platform.differentiable_all_gather_concat(x, None, 3, 0), [rank + 1], [10, 20, 30])


@_picture("all-gather, used as varying")
def _(rank: int) -> Rows:
    platform = hp.get_platform()
    return _run(
        lambda x: platform.differentiable_all_gather_concat(x, None, 3, 0, grad="reduce_scatter"),
        [rank + 1],
        ([1, 0, 2], [0, 3, 1], [4, 1, 1])[rank],
    )


@_picture("reduce-scatter")
def _(rank: int) -> Rows:
    platform = hp.get_platform()
    return _run(
        lambda x: platform.differentiable_reduce_scatter(x, 3, 0, "sum", None),
        [3 * rank + 1, 3 * rank + 2, 3 * rank + 3],
        [10 * (rank + 1)],
    )


@_picture("all-to-all")
def _(rank: int) -> Rows:
    platform, tens = hp.get_platform(), 10 * (rank + 1)
    return _run(
        lambda x: platform.differentiable_all_to_all_single(x, None, None, None),
        [tens + 1, tens + 2, tens + 3],
        [3 * rank + 1, 3 * rank + 2, 3 * rank + 3],
    )


@_picture("all-to-all, uneven")
def _(rank: int) -> Rows:
    sends = ((0, 2, 1), (1, 0, 0), (1, 0, 1))  # how many rows each rank has for each other
    receives = [tuple(sent[to] for sent in sends) for to in range(3)]
    tens = 10 * (rank + 1)
    rows = [tens + to + 1 for to, count in enumerate(sends[rank]) for _ in range(count)]
    return _run(
        lambda x: hp.get_platform().differentiable_all_to_all_single(x, sends[rank], receives[rank], None),
        rows,
        ([1, 2], [3, 4], [5, 6])[rank],
    )


@_picture("broadcast")
def _(rank: int) -> Rows:
    platform, mine = hp.get_platform(), ours(_tensor(float(rank == 0)))
    return _run(lambda x: platform.differentiable_all_reduce(x * mine, "sum", None), [rank + 7], [10])


@_picture("exchange")
def _(rank: int) -> Rows:
    peer = (1, 0, 2)[rank]
    rows = _run(lambda x: hp.get_platform().p2p_exchange(x, peer), [rank + 1], [10 * (rank + 1)])
    assert {rows.pop("forward"), rows.pop("backward")} == {"nothing" if peer == rank else "exchange"}
    return rows


# ---------------------------------------------------------------- redistribution


@_picture("Partial -> Replicate")
def _(rank: int) -> Rows:
    return _move(hp.Partial(), hp.Replicate(), [rank + 1], [10])


@_picture("Partial -> Shard")
def _(rank: int) -> Rows:
    return _move(hp.Partial(), hp.Shard(0), [3 * rank + 1, 3 * rank + 2, 3 * rank + 3], [10 * (rank + 1)])


@_picture("Shard -> Replicate, used whole")
def _(rank: int) -> Rows:
    return _move(hp.Shard(0), hp.Replicate(), [rank + 1], [10, 20, 30])


@_picture("Shard -> Replicate, used as varying")
def _(rank: int) -> Rows:
    row = ([1, 0, 2], [0, 3, 1], [4, 1, 1])[rank]
    x, w = _dtensor([[rank + 1]], hp.Shard(1)), _dtensor([row], hp.Shard(0), needs_grad=False)
    with hp.CommRecorder() as forward:
        y = x.redistribute(placements=_REPLICATE)
        z = linear(y, w)
    with hp.CommRecorder() as back:
        (found,) = grad((z.sum(),), (x,))
    assert z.placements == (hp.Shard(1),)
    return {
        "forward": _sent(forward),
        "backward": _sent(back),
        "x": [rank + 1],
        "y": theirs(y.to_local())[0],
        "w": row,
        "z": theirs(z.to_local())[0],
        "dL/dz": [1],
        "dL/dy, part": _part(y, w, [[1]]),
        "dL/dx": theirs(found.to_local())[0],
    }


def _part(x: Any, weight: Any, gradient: Any) -> Any:
    """What autograd gives on this rank alone for the input of a linear layer with this rank's block of the weight."""
    here = leaf(theirs(x.to_local()))
    (found,) = grad((linear(here, weight.to_local()),), (here,), (ours(_tensor(gradient)),))
    return theirs(found)[0]


@_picture("Replicate -> Shard")
def _(rank: int) -> Rows:
    return _move(hp.Replicate(), hp.Shard(0), [1, 2, 3], [10 * (rank + 1)])


@_picture("Shard(0) -> Shard(1)")
def _(rank: int) -> Rows:
    tens = 10 * (rank + 1)
    rows = _move(hp.Shard(0), hp.Shard(1), [[tens + 1, tens + 2, tens + 3]], [[3 * i + rank + 1] for i in range(3)])
    return {name: torch.tensor(row).flatten() if name in ("x", "dL/dy") else row for name, row in rows.items()} | {
        name: rows[name].flatten() for name in ("y", "dL/dx")
    }


@_picture("Replicate -> Partial")
def _(rank: int) -> Rows:
    return _move(hp.Replicate(), hp.Partial(), [5], [10])


@_picture("Shard -> Partial")
def _(rank: int) -> Rows:
    return _move(hp.Shard(0), hp.Partial(), [rank + 1], [10, 20, 30])


# ---------------------------------------------------------------- edges to plain tensors


def _to_local(rank: int, value: list[int], placement: hp.Placement, gradient: list[int], **options: Any) -> Rows:
    x = _dtensor(value, placement)
    local = x.to_local(**options)
    with hp.CommRecorder() as back:
        (found,) = grad((local,), (x,), (ours(_tensor(gradient)),))
    return {
        "backward": _sent(back),
        "x": value,
        "local": theirs(local),
        "dL/dlocal": gradient,
        "dL/dx": theirs(found.to_local()),
    }


@_picture("to_local of a shard")
def _(rank: int) -> Rows:
    return _to_local(rank, [rank + 1], hp.Shard(0), [10 * (rank + 1)])


@_picture("to_local of a replicated value, used whole")
def _(rank: int) -> Rows:
    return _to_local(rank, [5], hp.Replicate(), [10])


@_picture("to_local of a replicated value, used as varying")
def _(rank: int) -> Rows:
    return _to_local(rank, [5], hp.Replicate(), [rank + 1], grad_placements=_PARTIAL)


def _from_local(value: list[int], placement: hp.Placement, gradient: list[int], **options: Any) -> Rows:
    local = leaf(_tensor(value))
    x = from_local(local, _mesh(), [placement], **options)
    seed = from_local(ours(_tensor(gradient)), x.device_mesh, x.layout.gradient().placements)
    with hp.CommRecorder() as back:
        (found,) = grad((x,), (local,), (seed,))
    return {"backward": _sent(back), "local": value, "dL/dx": gradient, "dL/dlocal": theirs(found)}


@_picture("from_local as a summand")
def _(rank: int) -> Rows:
    return _from_local([rank + 1], hp.Partial(), [10])


@_picture("from_local of a replicated value, for code that sums")
def _(rank: int) -> Rows:
    return _from_local([5], hp.Replicate(), [10], grad_placements=_PARTIAL)


# ---------------------------------------------------------------- operators


@_picture("column, then row")
def _(rank: int) -> Rows:
    up_row, down_column = ([1, 0], [0, 1], [1, 1])[rank], rank + 2
    x = _dtensor([[1, 2]], hp.Replicate())
    up, down = _dtensor([up_row], hp.Shard(0)), _dtensor([[down_column]], hp.Shard(1))
    with hp.CommRecorder() as forward:
        h = linear(x, up)
        y = linear(h, down)
        out = y.redistribute(placements=_REPLICATE)
        loss = out.sum() * 10.0
    of_y, of_h = (grad((loss,), (one,), retain_graph=True)[0] for one in (y, h))
    with hp.CommRecorder() as back:
        backward(loss)
    assert (h.placements, y.placements) == ((hp.Shard(1),), (hp.Partial(),))
    return {
        "forward": _sent(forward),
        "backward": _sent(back),
        "x": [1, 2],
        "up": up_row,
        "h": theirs(h.to_local())[0],
        "down": [down_column],
        "y": theirs(y.to_local())[0],
        "out": theirs(out.to_local())[0],
        "dL/dy": theirs(of_y.to_local())[0],
        "dL/dh": theirs(of_h.to_local())[0],
        "dL/dx, part": _part(x, up, theirs(of_h.to_local())),
        "dL/dx": theirs(grad_of(x).to_local())[0],
        "dL/dup": theirs(grad_of(up).to_local())[0],
        "dL/ddown": theirs(grad_of(down).to_local())[0],
    }


# ---------------------------------------------------------------- the page


def _drawn() -> dict[str, dict[str, Any]]:
    """The pictures of the page: name -> row -> the cells of the three ranks, or what is sent."""
    found: dict[str, dict[str, Any]] = {}
    for block in re.findall(r"^```text\n(.*?)^```$", _PAGE.read_text(), re.MULTILINE | re.DOTALL):
        lines = block.splitlines()
        if not any(line.split() == ["rank", "0", "rank", "1", "rank", "2"] for line in lines):
            continue
        rows: dict[str, Any] = {}
        for line in lines[1:]:
            name, *cells = re.split(r"\s{2,}", line.strip())
            if name.startswith(("forward:", "backward:")):
                rows.update(cell.split(": ") for cell in (name, *cells))
            elif len(cells) == 3:
                rows[name] = cells
        title = re.split(r"\s{2,}", lines[0])[0]
        assert title not in found, f"{title} is drawn twice"
        found[title] = rows
    return found


def _as_cell(value: Any) -> Any:
    return value if isinstance(value, str) else torch.as_tensor(value, dtype=torch.float64).tolist()


@run_on_ranks(3)
def test_the_pictures_of_gradients_are_true() -> None:
    rank = hp.get_platform().get_rank()
    drawn = _drawn()
    assert set(drawn) == set(_pictures)
    for name, compute in _pictures.items():
        shown = {
            row: cells if isinstance(cells, str) else _as_cell(json.loads(cells[rank]))
            for row, cells in drawn[name].items()
        }
        computed = {row: _as_cell(value) for row, value in compute(rank).items()}
        assert shown == computed, name
