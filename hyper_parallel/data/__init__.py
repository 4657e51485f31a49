"""Data of a run: which sample comes when, and the files samples are read from. Free of any framework.

Note [Addressed, not counted]
Sample n of a run is a function of n and the seed. Nothing here keeps state per rank, per worker or per epoch: what a
checkpoint holds is one position, and a run goes on under any other number of ranks or batch size.

Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME_OF = {
    "Order": "order",
    "shuffled": "shuffle",
    "Prefetch": "prefetch",
    "Sample": "sample",
    "Dataset": "dataset",
    "Subset": "dataset",
    "Batch": "batch",
    "collate": "batch",
    "IGNORED": "sample",
    "TokenFile": "token_file",
    "RowFile": "row_file",
    "Synthetic": "synthetic",
    "Mixture": "mixture",
    "first_fit_decreasing": "preparing.packing",
    "ByteTokenizer": "preparing.tokenizer",
    "FileTokenizer": "preparing.tokenizer",
    "load_tokenizer": "preparing.tokenizer",
    "ChatTemplate": "preparing.chat",
    "load_chat_template": "preparing.chat",
    "DataConfig": "config",
    "SourceConfig": "config",
    "prepare": "preparing.prepare",
    "open_data": "opening",
    "open_validation": "opening",
    "PackingProof": "proof",
    "prove_packing": "proof",
    "prove_loss_mask": "proof",
    "spell": "spelling",
    "show_sample": "showing",
}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
