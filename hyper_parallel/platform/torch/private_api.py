"""Names that PyTorch keeps to itself and that there is no public way around: what an upgrade must look at first."""

from __future__ import annotations

from torch._ops import OpOverload as OpOverload
from torch.utils._python_dispatch import _disable_current_modes

# One form of an operator, as dispatch modes and checkpoint policies get it: its name, namespace and schema.
__all__ = ["OpOverload", "outside_of_modes"]

# Around a call that no dispatch mode shall see, such as those that count operators or keep their results.
outside_of_modes = _disable_current_modes
