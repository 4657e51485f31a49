"""What this library replaces in PyTorch, in one place, and the list of it: what an upgrade must look at again.

Some replacements are made when the library hands over what they need: the dispatcher (``function_calls``,
``random_state``, ``masked_functions``, ``compiling``), the optimizers' rules
(``optimizer_steps``) and the first draw by sample (``addressed_draws``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils import checkpoint

from hyper_parallel.platform.torch.base.dtensor_base import graph_functions
from hyper_parallel.platform.torch.dtensor import dtensor_gradients
from hyper_parallel.platform.torch.modules.activation import never_keep_collectives
from hyper_parallel.platform.torch.takes_over import gradient_hooks
from hyper_parallel.platform.torch.takes_over.checkpoint_inputs import keep_labels_of_inputs
from hyper_parallel.platform.torch.takes_over.function_transforms import set_transforms
from hyper_parallel.platform.torch.takes_over.scripted_functions import set_scripted_calls


class Replaced(NamedTuple):
    """A function of PyTorch that is replaced, or a table of it that is added to."""

    name: str  # below ``torch``
    file: str  # of this folder
    why: str
    when_asked: bool = False  # at the first use of what needs it


REPLACED = (
    Replaced("autograd.Function.apply", "function_calls", "functions of users get DTensors as they expect tensors"),
    Replaced("jit.ScriptFunction.__call__", "scripted_functions", "compiled functions get whole shapes, not blocks"),
    Replaced("get_rng_state", "random_state", "recomputed dropout draws the same numbers"),
    Replaced("set_rng_state", "random_state", "recomputed dropout draws the same numbers"),
    Replaced("_VF.dropout", "addressed_draws", "random functions, all of them, draw by sample", when_asked=True),
    Replaced("utils.checkpoint._CheckpointFrame.save_inputs", "checkpoint_inputs", "inputs stay DTensors"),
    Replaced("utils.checkpoint._CheckpointFrame.get_inputs", "checkpoint_inputs", "inputs stay DTensors"),
    Replaced(
        "utils.checkpoint._default_meta_extractor", "checkpoint_inputs", "what is saved is compared by its blocks"
    ),
    Replaced("utils.hooks.BackwardHook._apply_on_tensors", "gradient_hooks", "backward hooks of modules get DTensors"),
    Replaced("_functorch.eager_transforms.grad_and_value_impl", "function_transforms", "torch.func.grad on DTensors"),
    Replaced("_functorch.eager_transforms._vjp_with_argnums", "function_transforms", "torch.func.vjp on DTensors"),
    Replaced(
        "_functorch.eager_transforms._maybe_wrap_functional_tensor",
        "function_transforms",
        "functionalize refuses DTensors",
    ),
    Replaced("func.linearize", "function_transforms", "linearize refuses DTensors"),
    Replaced("_functorch.vmap._add_batch_dim", "function_transforms", "vmap refuses DTensors"),
    Replaced("autograd.forward_ad.make_dual", "function_transforms", "forward-mode derivatives refuse DTensors"),
    Replaced("masked.sum", "masked_functions", "torch.masked's functions, all of them, take DTensors"),
    Replaced("nn.modules.transformer._detect_is_causal_mask", "masked_functions", "nn.Transformer takes sharded masks"),
    Replaced("compile", "compiling", "compiled code runs operators on DTensors as they are"),
    Replaced("optim.AdamW.step", "optimizer_steps", "element-wise optimizers, all of them, step on local tensors"),
)


def install() -> None:
    """Replace what needs nothing from the library above; twice is once."""
    keep_labels_of_inputs()
    never_keep_collectives()
    set_transforms()
    set_scripted_calls()
    gradient_hooks.set_module_hooks()
    graph_functions.update(
        {
            torch.autograd.backward: dtensor_gradients.backward,
            torch.autograd.grad: dtensor_gradients.grad,
            torch.Tensor.register_hook: gradient_hooks.register_hook,
        }
    )


def replaced_functions() -> list[tuple[str, str, str]]:
    """(name, state, reason); state: "ours", "theirs" (not replaced now), or "missing" in this version of PyTorch.

    What is replaced when it is asked for is "ours" before that too.
    """
    found = []
    for one in REPLACED:
        state = _state(one.name)
        is_to_come = one.when_asked and state == "theirs"
        found.append((f"torch.{one.name}", "ours" if is_to_come else state, f"{one.why} ({one.file}.py)"))
    runs_again = torch.ops.c10d.allreduce_.default in checkpoint.SAC_IGNORED_OPS
    state = "ours" if runs_again else "theirs"
    found.append(
        ("torch.utils.checkpoint.SAC_IGNORED_OPS", state, "recomputation runs collectives again (activation.py)")
    )
    return found


def _state(name: str) -> str:
    value: Any = torch
    for part in name.split("."):
        value = getattr(value, part, None)
        if value is None:
            return "missing"
    function = getattr(value, "__func__", value)
    code = getattr(function, "__code__", None)
    return "ours" if code is not None and "hyper_parallel" in code.co_filename else "theirs"
