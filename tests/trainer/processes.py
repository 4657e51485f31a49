"""``hyper-parallel train`` as a user runs it, in processes that tests can kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hyper_parallel.trainer.config import load_config
from hyper_parallel.trainer.config.run_config import RunConfig
from hyper_parallel.trainer.metrics import read_metrics
from tests.commands import command_environment

CONFIG = """
[model]
name = "llama"
args = {{ dim = 16, num_blocks = 2, num_heads = 4, num_kv_heads = 2, hidden_dim = 24, vocab_size = 256 }}
[data]
length = 16
isolate = false
[train]
steps = {steps}
batch = 4
dtype = "float64"
[optimizer]
eps = 1e-6
[schedule]
name = "constant"
[checkpoint]
every = {every}
[log]
folder = "run"
[launch]
nproc = {nproc}
max_restarts = {restarts}
forecast = false
"""


def write_config(folder: Path, nproc=1, steps=30, every=5, restarts=0) -> Path:
    """The config of a run in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(CONFIG.format(nproc=nproc, steps=steps, every=every, restarts=restarts))
    return folder / "run.toml"


def config_here(folder: Path, *sets: str, **values) -> RunConfig:
    """The same run for this process, whose ranks may be threads."""
    return load_config(write_config(folder, **values), [*sets, f"log.folder={folder / 'run'}"]).config


class Run:
    """A run in ``folder``; a context that ends it."""

    def __init__(self, folder: Path, *sets: str, nproc=2, platform="torch", **values):
        self.folder = folder
        write_config(folder, nproc=nproc, **values)
        options = [part for one in sets for part in ("--set", one)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hyper_parallel.cli", "train", "run.toml", *options],
            cwd=folder,
            env=command_environment(OMP_NUM_THREADS="1", HYPER_PARALLEL_PLATFORM=platform),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # Its ranks die with it.
        self.process.communicate()

    def end(self, timeout=240.0):
        """Wait for its end: (status, output, errors)."""
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err

    def wait_for(self, what, timeout=240.0):
        """Wait until ``what()`` is true; its value."""
        end = time.monotonic() + timeout
        while not (found := what()):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, "it did not come"
            time.sleep(0.01)
        return found

    def wait_for_step(self, step):
        self.wait_for(lambda: any(number >= step for number in self.losses()))

    def ranks(self):
        """The process of each rank, by rank."""
        found = {}
        for place in Path("/proc").iterdir():
            if place.name.isdigit():
                try:
                    variables = (place / "environ").read_bytes().split(b"\0")
                    parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:
                    continue
                if parent == self.process.pid:
                    ranks = [one for one in variables if one.startswith(b"RANK=")]
                    found |= {int(one[5:]): int(place.name) for one in ranks}
        return found

    def losses(self):
        return {line["step"]: line["loss"] for line in read_metrics(self.folder / "run") if line["event"] == "step"}

    def events(self, event):
        return [line for line in read_metrics(self.folder / "run") if line["event"] == event]
