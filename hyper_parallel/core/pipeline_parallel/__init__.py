"""Pipeline parallelism: schedules as tables that are data, simulated and proven before anything runs."""

from hyper_parallel.core.pipeline_parallel.action import Action, Kind, Value
from hyper_parallel.core.pipeline_parallel.check import check, find_faults
from hyper_parallel.core.pipeline_parallel.faults import Fault, TableError
from hyper_parallel.core.pipeline_parallel.folding import batch_messages, fold_backward
from hyper_parallel.core.pipeline_parallel.memory import Peak, Sizes, peaks
from hyper_parallel.core.pipeline_parallel.messages import add_messages
from hyper_parallel.core.pipeline_parallel.prepare import prepare
from hyper_parallel.core.pipeline_parallel.sharding import add_sharding
from hyper_parallel.core.pipeline_parallel.simulate import Timeline, Times, simulate
from hyper_parallel.core.pipeline_parallel.stage_map import StageMap
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.core.pipeline_parallel.tables import SCHEDULES, forward_only, make_table

__all__ = [
    "SCHEDULES",
    "Action",
    "Fault",
    "Kind",
    "Peak",
    "Sizes",
    "StageMap",
    "Table",
    "TableError",
    "Timeline",
    "Times",
    "Value",
    "add_messages",
    "add_sharding",
    "batch_messages",
    "check",
    "find_faults",
    "fold_backward",
    "forward_only",
    "make_table",
    "peaks",
    "prepare",
    "simulate",
]
