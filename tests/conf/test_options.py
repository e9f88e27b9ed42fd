"""conf/ holds every option of the contract, and each one composes."""

import pytest

from pensieve.lab.compose.conf import options, read_option
from pensieve.lab.compose.model_files import ModelConfig
from pensieve.lab.compose.settings import check, resolved
from pensieve.specs import ModelSpec
from tests.composed import composed

CONTRACT = {
    "model": "tiny smollm2_135m smollm2_135m_gguf gpt2 opt_125m opt_350m opt_13b opt_66b llama2_7b llama2_13b "
    "llama2_13b_gqa llama2_70b llama3_8b llama3_8b_instruct gemma2_27b_it",
    "cache": "demo tiny small medium large xlarge",
    "eviction": "retention_value lru fifo conversation_lru belady learned_return learned_unguarded",
    "scheduler": "unified split",
    "baseline": "pensieve pensieve_shared gpu_only stateless prefix_cache vllm_offload llama_slots native_pytorch "
    "transformers_cb llama_cpp llama_cpp_http vllm vllm_http vllm_offloading openai_http ray_keepalive ray_serverless "
    "vllm_offloading_arc vllm_offloading_own semantic_blind partially_aware fully_aware",
    "workload": "chat hotness sharegpt ultrachat trace prefix_invalidation decode agents rounds",
    "hardware": "local cpu cuda sim_a100_80g sim_a100_80g_pcie sim_h100 sim_h200 sim_gtx1650",
    "tracking": "local postgres off",
    "sweep": "baselines none",
}
PARAMETERS = {  # billions, as the models' cards give them
    "tiny": 0.0105, "smollm2_135m": 0.135, "smollm2_135m_gguf": 0.135,
    "gpt2": 0.124, "opt_125m": 0.125, "opt_13b": 12.9, "opt_66b": 65.7, "llama2_7b": 6.74, "llama2_13b": 13.0,
    "llama2_70b": 69.0, "llama3_8b": 8.03, "gemma2_27b_it": 27.2,
}  # fmt: skip


@pytest.mark.parametrize("group", CONTRACT)
def test_every_option_composes_carries_its_name_and_is_the_same_read_by_itself(group):
    assert set(CONTRACT[group].split()) <= set(options(group))
    for option in options(group):
        if group == "sweep" or (group, option) == ("model", "hf"):  # hf asks for a model
            continue
        cfg = composed(f"{group}={option}")
        assert cfg[group].name == option or option not in CONTRACT[group].split()
        assert read_option(group, option).items() <= resolved(cfg)[group].items()
        if (group, option) != ("workload", "trace"):
            assert check(cfg).seed == 0


@pytest.mark.parametrize(("model", "billions"), PARAMETERS.items())
def test_architectures_have_the_published_size(model, billions):
    architecture = ModelConfig.model_validate(resolved(composed(f"model={model}"))["model"]).architecture
    assert ModelSpec.from_architecture(model, architecture).parameters / 1e9 == pytest.approx(billions, rel=0.02)
