"""Where the tests of this folder say that PyTorch's own fully_shard fails, it is tried here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fully_shard.where_torch_fails import CASES

only_on = "torch"  # its fully_shard

#: What both ranks come to. A statement that is no longer true of a new version of PyTorch belongs out of our tests.
FOUND = {
    "uneven_other_dims": r"raised NotImplementedError: .*uneven sharding on dim 1",
    "without_dims": r"raised ValueError: .*scalar parameters",
    "several_dtypes": r"raised AssertionError: .*uniform original parameter dtype",
    "strided": r"raised NotImplementedError: .*non-contiguous parameters",
    "tied_across_units": r"raised ValueError: .*shared with a parameter already managed by another",
    "fresh_in_the_last_micro_batch": r"raised AssertionError: .*uniform gradient dtype",
    "view_written_in_place": r"raised RuntimeError: .*storage of size 0",
    "step_before_backward": r"no error$",
    "exception_in_forward": r"still whole: True$",
    "autograd_grad": r"all None: True$",
    "part_before_root": r"raised RuntimeError: .*running forward through the root module first",
    "converted_after_a_step": r"raised RuntimeError: .*dtype double",
    "deep_copied": r"raised AssertionError: .*deepcopy",
    "clipped_over_two_meshes": r"raised RuntimeError: .*must have the same mesh",
    "alike_on_some_ranks": r"all there: False$",
    "unequal_counts": r"the mean: False$",
}


def _run(*names: str) -> subprocess.CompletedProcess[str]:
    program = Path(__file__).with_name("where_torch_fails.py")
    return subprocess.run([sys.executable, program, *names], capture_output=True, text=True, timeout=180, check=False)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    done = _run(*FOUND)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.sweep
@pytest.mark.parametrize("case", FOUND)
def test_what_torch_does(lines, case) -> None:
    results = [line for line in lines if re.match(rf"{case}: {FOUND[case]}", line)]
    assert len(results) == 2, [line for line in lines if line.startswith(case)]


@pytest.mark.sweep
def test_ranks_that_use_different_parameters() -> None:
    """Ranks abort, or wait for each other until the time limit of 20 seconds."""
    done = _run("used_on_some_ranks")
    assert "SIGABRT" in done.stderr or "used_on_some_ranks: raised" in done.stdout, done.stdout + done.stderr
    assert set(CASES) == {*FOUND, "used_on_some_ranks"}
