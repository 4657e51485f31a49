"""What ``platform/mindspore/mends`` mends is still wrong in MindSpore: the smallest programs, without this library.

Where one of these is right, its file and the lines that call it can go.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from mindspore import __version__

PROGRAM = """
import json

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore._c_expression import run_backward
from mindspore.graph.api import _pynative_executor


def ones(*shape):
    return Tensor(np.ones(shape, np.float32))


def refusal(function):
    try:
        return repr(function())
    except Exception as error:
        return str(error).strip().splitlines()[0]


ms.runtime.launch_blocking()
is_wrong = {}

ms.grad(lambda x: ops.softmax(x, 1).sum())(ones(2, 1))
factor = Tensor(np.array([[1.0, 0.0, 0.0]], np.float32))
gradient = ms.grad(lambda x: (ops.softmax(x, 1) * factor).sum())(ones(1, 3)).asnumpy()
is_wrong["softmax_of_one"] = not np.allclose(gradient, [[2 / 9, -1 / 9, -1 / 9]])

numbers = Tensor(np.random.RandomState(0).rand(9).astype(np.float32))
is_wrong["same_bits"] = len({ops.log(numbers).asnumpy().tobytes() for _ in range(12)}) > 1

fourth_power = lambda x: ((x * x).reshape(1) ** 2).sum()
second = ms.grad(lambda x: ms.grad(fourth_power)(x).sum())(Tensor(np.array([[2.0]])))
is_wrong["second_gradients"] = second.asnumpy() != 48.0

row = ms.grad(lambda row: mint.matmul(row, ones(3, 4)).sum())(ones(1, 1, 3))
is_wrong["row_products"] = row.shape != (1, 1, 3)

signal = Tensor(np.array([1.0, 2.0, 4.0], np.float32))
is_wrong["real_spectra"] = not np.allclose(ops.ihfft(signal).asnumpy(), ops.ihfft(signal).asnumpy())

x = ones(2)
x.add_(x)
is_wrong["in_place"] = x.asnumpy()[0] != 2.0

x, state = ones(64), ms.get_rng_state()
first = ops.dropout(x, 0.5)
ms.set_rng_state(state)
is_wrong["dropout_masks"] = not np.array_equal(first.asnumpy(), ops.dropout(x, 0.5).asnumpy())

used = [ones(1000) * 7 for _ in range(20)]
del used
product = mint.matmul(Tensor(np.zeros((1, 0), np.float32)), Tensor(np.zeros((0, 1000), np.float32)))
is_wrong["empty_blocks"] = bool(product.asnumpy().any())

is_wrong["missing_kernels"] = "unregistered" in refusal(lambda: ones(1).clone())

_pynative_executor.set_grad_flag(True)
weight = Tensor(np.zeros((2, 3), np.float32))
weight.requires_grad_()
x, factor = Tensor(np.array([[1.0, 2.0, 3.0]], np.float32)), Tensor(np.array([[1.0, 10.0]], np.float32))
for _ in range(2):
    run_backward((((x @ weight.T) * factor).sum(),), (Tensor(1.0),), False, False, ())
is_wrong["leaf_gradients"] = not np.allclose(weight._grad.asnumpy(), [[2, 4, 6], [20, 40, 60]])

x = ones(2)
x.requires_grad_()
is_wrong["nan_mean"] = "top_cell" in refusal(lambda: ops.nanmean(x))

print(json.dumps({name: bool(value) for name, value in is_wrong.items()}))
"""


@pytest.mark.skipif(not __version__.startswith("2.10."), reason="written about MindSpore 2.10")
def test_what_is_mended_is_still_wrong():
    environment = os.environ | {"GLOG_v": "3"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    is_wrong = json.loads(done.stdout.splitlines()[-1])
    assert all(is_wrong.values()), is_wrong
