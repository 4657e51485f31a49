"""Models of Hugging Face inside of peft's adapters: the numbers of one device, and a folder that peft opens."""

from __future__ import annotations

import copy

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.testing import threads

only_on = "torch"

LAYOUTS = {"tp=2": 2, "dp_shard=2, tp=3": 6, "cp=2": 2, "pp=2": 2}
IDS = torch.randint(0, 61, (6, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def base():
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


def _adapted(base, kind):
    import peft

    task = {"task_type": "CAUSAL_LM"}
    torch.manual_seed(1)
    config = {
        "lora": lambda: peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, **task),
        "dora": lambda: peft.LoraConfig(
            r=3, target_modules=["q_proj", "down_proj"], use_dora=True, init_lora_weights=False, **task
        ),
        "ia3": lambda: peft.IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False, **task
        ),
        "head beside": lambda: peft.LoraConfig(
            r=3, target_modules=["o_proj"], modules_to_save=["lm_head"], init_lora_weights=False, **task
        ),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **task),
    }[kind]()
    return peft.get_peft_model(copy.deepcopy(base), config).eval()


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, hp.DTensor) else tensor


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "head beside", "prompt"])
def test_loss_and_gradients_of_adapters_are_those_of_one_device(base, kind, layout):
    alone = _adapted(base, kind)
    loss = alone(input_ids=IDS, labels=IDS).loss
    loss.backward()
    want = {name: one.grad for name, one in alone.named_parameters()}

    def program():
        run = hp.parallelize(_adapted(base, kind), layout)
        mine = run.mine(range(len(IDS)))
        found = run.forward_backward(input_ids=IDS[mine], labels=IDS[mine])
        return found, {name: _whole(one.grad) for name, one in run.named_parameters()}

    gradients = {}
    for found, own in threads(LAYOUTS[layout]).run(program):
        torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=1e-6)
        gradients |= own
    assert gradients.keys() == want.keys()
    for name, gradient in want.items():
        assert (gradients[name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize(("kind", "layout"), [("lora", "tp=2"), ("lora", "pp=2"), ("prompt", "dp_shard=2")])
def test_peft_opens_what_a_run_saves(base, kind, layout, tmp_path):
    import peft

    def program():
        run = hp.parallelize(_adapted(base, kind), layout)
        optimizer = torch.optim.SGD([one for one in run.parameters() if one.requires_grad], lr=1.0)
        mine = run.mine(range(len(IDS)))
        run.forward_backward(input_ids=IDS[mine], labels=IDS[mine])
        optimizer.step()
        run.save_adapters(tmp_path / "adapter", base="somewhere")
        with pytest.raises(ValueError, match=r"save_hugging_face: the model is inside of peft.* write them by save_ad"):
            run.save_hugging_face(tmp_path / "folder")
        return run.loss_of(input_ids=IDS[mine], labels=IDS[mine])

    loss = threads(2).run(program)[0]
    opened = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter").eval()
    assert opened.peft_config["default"].base_model_name_or_path == "somewhere"
    torch.testing.assert_close(opened(input_ids=IDS, labels=IDS).loss.detach(), loss, rtol=1e-5, atol=1e-6)


def test_an_adapter_on_the_embedding_is_refused_by_stages(base):
    import peft

    def program():
        config = peft.LoraConfig(r=2, target_modules=["embed_tokens"])
        hp.parallelize(peft.get_peft_model(copy.deepcopy(base), config), "pp=2")

    with pytest.raises(ValueError, match=r"embed_tokens' runs before the blocks with parameters of .*use tp, dp_shard"):
        threads(2).run(program)


def test_adapters_on_parameters_are_refused_where_these_are_sharded(base):
    def work():
        import peft

        config = peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=["mlp.down_proj.weight"])
        model = peft.get_peft_model(copy.deepcopy(base), config)
        told = r"layers.0.mlp.down_proj.weight' \(target_parameters\).*adapt linear layers \(target_modules\)"
        with pytest.raises(ValueError, match=told):
            hp.parallelize(model, "dp_shard=2")

    threads(2).run(work)
