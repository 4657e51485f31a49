"""Starting ranks, joining their world, stopping them: who this process is, where its world meets, what it died of."""

from hyper_parallel.launch.environments import Place, find_place
from hyper_parallel.launch.failures import RankFailure
from hyper_parallel.launch.join import join
from hyper_parallel.launch.local import run_local
from hyper_parallel.launch.notes import note_checkpoint, note_step
from hyper_parallel.launch.signals import StopRequest

__all__ = ["Place", "RankFailure", "StopRequest", "find_place", "join", "note_checkpoint", "note_step", "run_local"]
