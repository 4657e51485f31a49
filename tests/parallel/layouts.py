"""Degrees that tests try, with their number of ranks."""

LAYOUTS = {
    "dp_shard=1": 1,
    "dp_replicate=2": 2,
    "dp_shard=2": 2,
    "tp=2": 2,
    "cp=2": 2,
    "dp_shard=2, tp=2": 4,
    "cp=2, tp=2": 4,
    "dp_replicate=2, dp_shard=2": 4,
    "dp_shard=2, cp=2": 4,
}
