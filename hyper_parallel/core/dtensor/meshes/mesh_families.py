"""Families of blocks: all the sub-meshes that one cut of a mesh gives.

A sub-mesh is cut around one rank: mesh["tp"] of (dp=2, tp=2) is [0, 1] on ranks 0 and 1, and [2, 3] on ranks 2 and 3.
Joining axes again (concatenate, or mesh["dp_cp", "tp"] after a flatten) needs the lines of the other ranks as well.
So every mesh knows its root and its family: all the equal blocks into which the root falls when it is cut that way,
an array (num_blocks, *shape) of ranks. The mesh itself is one of these blocks. Flattening and splitting an axis are
reshapes of the family, picking an axis moves the others to the front, and joining two families is join_families.
"""

from __future__ import annotations

import numpy as np

from hyper_parallel.core.dtensor.meshes.mesh_description import Ranks


def block_positions(blocks: Ranks) -> tuple[Ranks, Ranks]:
    """By rank: the block of the family it is in, and its position there."""
    flat = blocks.reshape(len(blocks), -1)
    block, position = np.full((2, int(flat.max()) + 1), -1, dtype=np.int64)
    block[flat] = np.arange(len(flat))[:, None]
    position[flat] = np.arange(flat.shape[1])[None, :]
    return block, position


def join_families(first: Ranks, second: Ranks) -> Ranks | None:
    """The family with the axes of both, or None if they are not independent.

    A joined block starts from a block of ``first`` whose ranks are all at the start of their blocks of ``second``, and
    has these as its rows. They are independent when every column is again a block of ``first``, in its order, and the
    joined blocks hold every rank of the root once.
    """
    rows, columns = first.reshape(len(first), -1), second.reshape(len(second), -1)
    first_block, first_position = block_positions(first)
    second_block, second_position = block_positions(second)
    starts = rows[(second_position[rows] == 0).all(axis=1)]
    grid = columns[second_block[starts]]
    if grid.size != rows.size or np.unique(grid).size != grid.size:
        return None
    in_order = first_position[grid] == np.arange(rows.shape[1])[None, :, None]
    in_one_block = first_block[grid] == first_block[grid[:, :1]]
    if not (in_order.all() and in_one_block.all()):
        return None
    return grid.reshape(-1, *first.shape[1:], *second.shape[1:])


def same_family(first: Ranks, second: Ranks) -> bool:
    """Whether two flat families have the same lines, in any order."""
    return first.shape == second.shape and {tuple(line) for line in first.tolist()} == {
        tuple(line) for line in second.tolist()
    }
