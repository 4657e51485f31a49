"""The rules on MindSpore, by brute force, and what the page says about them."""

from __future__ import annotations

import re

import pytest

from hyper_parallel.core.shard.rule_kit.rule_table import rule_names
from tests.shard.mindspore_absent_rules import REASONS
from tests.shard.mindspore_samples import SAMPLES
from tests.shard.mindspore_validator import BEGIN, DOCS, END, MOST_LAYOUTS, row, validate

WRITE_IT = "write docs/mindspore.md anew: python -m tests.shard.mindspore_validator"


@pytest.fixture(scope="module")
def found(worlds):
    """What came of all samples on 2 ranks, of one in five where it is no sweep."""
    labels = [sample.label for sample in SAMPLES]
    return worlds(2, timeout=900).run(validate, labels if worlds.sweep else labels[::5], (2,), MOST_LAYOUTS)[0]


def test_every_sample_equals_one_device_under_every_layout(found):
    assert not found.wrong, f"{len(found.wrong)} of {len(SAMPLES)}:\n" + "\n".join(found.wrong)


@pytest.mark.sweep
def test_the_page_says_which_rules_were_validated(found):
    """Rules that were added since may be missing there."""
    said = DOCS.read_text().partition(BEGIN)[2].partition(END)[0]
    num_validated, num_rules = map(int, re.search(r"Validated: (\d+) of (\d+) rules", said).groups())
    assert num_validated <= len(found.validated()), WRITE_IT
    assert num_rules <= len(rule_names()), WRITE_IT
    for name, error in found.without_kernel().items():
        assert row(name, error) in said, WRITE_IT


@pytest.mark.sweep
def test_reasons_are_given_for_absent_rules_only(found):
    """And what MindSpore's programs come to instead are rules."""
    absent = {name: other for names in REASONS.values() for name, other in names.items()}
    assert not set(absent) & {*found.validated(), *found.without_kernel()}
    assert set(absent) | {other for other in absent.values() if other} <= set(rule_names())


SEVERAL_AXES = (
    *("add, stretched", "linear", "layer_norm", "softmax", "embedding", "cross_entropy", "ranges", "one row"),
    *("conv2d", "batch_norm", "mse_loss", "addmm"),
)


def test_on_two_axes(worlds):
    labels = list(SEVERAL_AXES)
    found = worlds(4, timeout=600).run(validate, labels if worlds.sweep else labels[::3], (2, 2), 16)[0]
    assert not found.wrong, "\n".join(found.wrong)
