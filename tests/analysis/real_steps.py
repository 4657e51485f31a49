"""The same step with memory: as a rank of a silent world on the CPU, with PyTorch's allocator watched."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hyper_parallel.analysis.rank_run import Job
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import Member, as_member

_DECODER = {
    "vocab_size": 2000,
    "hidden_size": 192,
    "intermediate_size": 528,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **_DECODER},
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        **_DECODER,
        "head_dim": 48,
        "tie_word_embeddings": True,
    },
    "mixtral": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        **_DECODER,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gpt_neox": {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], **_DECODER},
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 2000,
        "n_embd": 192,
        "n_layer": 2,
        "n_head": 6,
        "n_positions": 256,
    },
}


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**CONFIGS[name], **changes}))
    return path


def measured_growth(job: Job, rank: int) -> int:
    """How much the allocator's memory grows at most in a third step, when all that is kept is there already."""
    with as_member(Member(rank, job.world_size, get_platform().silent_group)):
        model, inputs = job.source.build(job.length)
        if job.dtype or job.source.dtype:
            model = get_platform().cast_model(model, job.dtype or job.source.dtype)
        assert inputs is None
        ids = torch.zeros(job.batch, job.length, dtype=torch.long)
        ids_name = "input_ids" if "input_ids" in get_platform().argument_names_of(model) else "ids"
        run = job.split(model, {ids_name: ids, "labels": ids})
        optimizer = get_platform().make_optimizer(job.optimizer, model, "cpu")

        def step() -> None:
            run.forward_backward(**{ids_name: ids, "labels": ids})
            if job.clip_norm is not None:
                run.clip_grad_norm_(job.clip_norm)
            optimizer.step()
            run.zero_grad()

        step()
        step()
        gc.collect()
        gc.disable()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
        gc.enable()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
