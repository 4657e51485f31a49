"""The reference models and files of the Hugging Face hub, one tensor for each expert: transformers computes the same
from what is written at any ep, and what it writes opens at any ep, on both frameworks."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.models import llama_mapping, mixture_mapping
from hyper_parallel.platform import get_platform
from tests.commands import command_environment
from tests.frameworks import on_mindspore, ours
from tests.models.test_mixture import values_of
from tests.world import run_on_ranks

SIZES = {"vocab_size": 37, "dim": 16, "num_blocks": 2, "num_heads": 4, "num_kv_heads": 2, "max_length": 32}
EXPERTS = {"num_experts": 5, "top_k": 2, "expert_dim": 12}
CASES = {
    "llama": {"hidden_dim": 24},
    "mixtral": EXPERTS,
    "glm4_moe": {
        **EXPERTS,
        "hidden_dim": 24,
        "num_dense_blocks": 1,
        "shared_dim": 12,
        "score_func": "sigmoid",
        "load_balance_coeff": 1e-3,
        "route_scale": 1.5,
    },
}
IDS = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(0))


def _config(case):
    kind = hp.models.LlamaConfig if case == "llama" else hp.models.MixtureConfig
    return kind(**SIZES, **CASES[case])


def _mapping(case):
    return llama_mapping() if case == "llama" else mixture_mapping(_config(case), case)


def _run(case, degrees="dp_shard=1"):
    with hp.deferred_init():
        model = (hp.models.Llama if case == "llama" else hp.models.Mixture)(_config(case))
    return hp.parallelize(model, degrees)


def _theirs(case):
    """The model of transformers that computes the same."""
    import transformers

    config = _config(case)
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_blocks,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
    }
    if case == "llama":
        return transformers.LlamaConfig(**sizes, intermediate_size=config.hidden_dim)
    sizes["num_experts_per_tok"] = config.top_k
    if case == "mixtral":
        return transformers.MixtralConfig(
            **sizes, num_local_experts=config.num_experts, intermediate_size=config.expert_dim
        )
    sizes["rope_parameters"]["partial_rotary_factor"] = 1.0
    return transformers.Glm4MoeConfig(
        **sizes,
        head_dim=config.head_dim,
        intermediate_size=config.hidden_dim,
        moe_intermediate_size=config.expert_dim,
        n_routed_experts=config.num_experts,
        n_shared_experts=1,
        first_k_dense_replace=config.num_dense_blocks,
        routed_scaling_factor=config.route_scale,
        n_group=1,
        topk_group=1,
        use_qk_norm=False,
        attention_bias=False,
    )


def _written_by_transformers(case, folder):
    """Its logits."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(_theirs(case))
    with torch.no_grad():
        for tensor in [*model.parameters(), *(one for name, one in model.named_buffers() if name.endswith("_bias"))]:
            if tensor.ndim == 1:
                tensor.add_(0.1 * torch.randn(tensor.shape))
    model.save_pretrained(folder)
    return _logits(model)


def _logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def _opened_by_transformers(case, folder):
    import transformers

    _theirs(case).save_pretrained(folder)
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return _logits(model)


def _same(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(on_mindspore, reason="models of transformers are PyTorch's")
@pytest.mark.parametrize("case", CASES)
def test_there_and_back_at_any_ep(case, tmp_path, sweep):
    from hyper_parallel.testing import threads

    want = _written_by_transformers(case, tmp_path / "theirs")
    degrees = {1: "dp_shard=1", 2: "dp_shard=2", 3: "dp_shard=3", 4: "dp_shard=4"}

    def work(ranks):
        run = _run(case, degrees[ranks] + (f", ep={ranks}" if ranks > 1 and case != "llama" else ""))
        run.load_hugging_face(tmp_path / "theirs", mapping=_mapping(case))
        run.save_hugging_face(tmp_path / f"ours of {ranks}", mapping=_mapping(case))
        with torch.no_grad():
            return run(IDS)

    for ranks in (1, 2, 3, 4) if sweep else (1, 3):  # 5 experts on 3 ranks are 2, 2 and 1, on 4 ranks 2, 2, 1 and none
        for got in threads(ranks).run(work, ranks):
            _same(got, want)
        assert torch.equal(_opened_by_transformers(case, tmp_path / f"ours of {ranks}"), want)


_BY_PYTORCH = """
import sys
import numpy as np
from tests.models.test_hub_names import _opened_by_transformers, _written_by_transformers
how = {"write": _written_by_transformers, "open": _opened_by_transformers}[sys.argv[1]]
np.save(sys.argv[4], how(sys.argv[2], sys.argv[3]).numpy())
"""


@pytest.mark.skipif(not on_mindspore, reason="the other framework")
@pytest.mark.sweep("mindspore")
@run_on_ranks(1, timeout=300)
def test_mindspore_opens_and_writes_them_too(tmp_path):
    def by_pytorch(how, folder):
        command = [sys.executable, "-c", _BY_PYTORCH, how, case, str(folder), str(tmp_path / "logits.npy")]
        subprocess.run(command, check=True, env=command_environment(), timeout=240)
        return np.load(tmp_path / "logits.npy")

    case, platform = "glm4_moe", get_platform()
    want = by_pytorch("write", tmp_path / "theirs")
    run = _run(case)
    run.load_hugging_face(tmp_path / "theirs", mapping=_mapping(case))
    with platform.no_grad():
        _same(values_of(run(ours(IDS))), want)
    run.save_hugging_face(tmp_path / "ours", mapping=_mapping(case))
    _same(by_pytorch("open", tmp_path / "ours"), want)


def test_mistakes_are_told():
    config = hp.models.MixtureConfig(shared_dim=4, load_balance_coeff=0.1)
    with pytest.raises(
        ValueError, match=r"family='jamba' is none of 'mixtral', 'qwen3_moe', 'deepseek_v3', 'glm4_moe'"
    ):
        mixture_mapping(config, "jamba")
    told = (
        r"files of mixtral have no place for what shared_dim, load_balance_coeff .*names of 'deepseek_v3' or 'glm4_moe'"
    )
    with pytest.raises(ValueError, match=told):
        mixture_mapping(config)
