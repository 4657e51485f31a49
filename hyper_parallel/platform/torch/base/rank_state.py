"""State of PyTorch that each rank of a world of threads has for itself; see Note [Members] in ``membership``."""

from __future__ import annotations

import torch

from hyper_parallel.platform.shared.membership import belongs_to_rank

_generator = torch.random.default_generator

belongs_to_rank(_generator.get_state, _generator.set_state)
belongs_to_rank(torch.get_default_dtype, torch.set_default_dtype)
