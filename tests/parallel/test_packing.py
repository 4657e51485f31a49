"""``Parallel.prove_packing``: a model that tells packed documents apart, and one that does not, under degrees."""

import pytest

pytest.importorskip("transformers", reason='these models are in an extra: pip install "hyper-parallel[transformers]"')

import hyper_parallel as hp
from hyper_parallel.testing import threads
from tests.tensor_parallel.hugging_face import build

only_on = "torch"


def _prove(name: str, degrees: str, options: dict[str, str]) -> str:
    run = hp.parallelize(build(name), degrees, **options)
    try:
        return str(run.prove_packing(length=12))
    except ValueError as error:
        return f"refused: {error}"


@pytest.mark.parametrize(
    ("name", "degrees", "options", "said"),
    [
        ("llama", "cp=2", {"order": "zigzag", "attention": "ring"}, "packed documents are isolated by position_ids: "),
        ("mamba", "cp=2", {}, "refused: in this model packed documents see each other, whichever way it is told "),
        ("opt", "cp=2", {}, "packed documents are isolated by attention_mask: "),
        pytest.param("bloom", "cp=2", {}, "refused: in this model", marks=pytest.mark.sweep),
        pytest.param(
            "gemma2",
            "cp=2",
            {"order": "striped"},
            "packed documents are isolated by position_ids: ",
            marks=pytest.mark.sweep,
        ),
        pytest.param("llama", "pp=2", {}, "packed documents are isolated by position_ids: ", marks=pytest.mark.sweep),
    ],
)
def test_documents_are_proven_apart_or_the_model_is_refused(name, degrees, options, said) -> None:
    build(name)
    for found in threads(2).run(_prove, name, degrees, options):
        assert found.startswith(said), found


def test_a_stage_that_refuses_a_mask_ends_the_proof() -> None:
    """Stage 0 of Bloom takes no mask of all pairs, and its peer would wait for what it hands on."""
    build("bloom")
    with pytest.raises(Exception, match=r"in this model packed documents see .*attention_mask: refused, PipelineError"):
        threads(2).run(lambda: hp.parallelize(build("bloom"), "pp=2").prove_packing(length=12))


def test_a_model_that_does_not_say_how_many_tokens_it_knows() -> None:
    import torch

    run = hp.parallelize(torch.nn.Linear(2, 2), loss=lambda outputs, batch: (outputs.sum(), outputs.numel()))
    with pytest.raises(ValueError, match="Linear does not say how many tokens it knows; give vocab_size"):
        run.prove_packing()
