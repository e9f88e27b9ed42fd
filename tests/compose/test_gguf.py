"""A model from a GGUF file: dequantised once, whole or not at all, and served like any other."""

import pytest

from pensieve import create_server
from pensieve.errors import EngineMissing, WeightsMissing
from pensieve.lab.compose import model_files as gguf
from pensieve.lab.compose.build import build_outside
from pensieve.lab.compose.model_files import (
    build_tokenizer,
    check_weights,
    model_config,
    own_folder,
    weights_identity,
    weights_kind,
)
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import resolved
from pensieve.lab.trial.job import identity_of
from tests.chat import dialogue
from tests.composed import checked, composed
from tests.engines.small import ask, prompt, served
from tests.tiny_gguf import write_gguf

pytest.importorskip("gguf")
pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture
def conversions(monkeypatch):
    """Every file that is dequantised from here on."""
    from pensieve.device import weights as reader

    made = []
    real = reader.dequantise
    monkeypatch.setattr(reader, "dequantise", lambda file, folder: (made.append(file), real(file, folder)))
    return made


def test_the_folder_is_what_transformers_reads_from_the_file(source):
    import torch
    from transformers import AutoModelForCausalLM

    model = model_config(str(source))
    assert (model.name, model.weights, weights_kind(model)) == ("tiny", "gguf", "gguf")
    check_weights(model)
    folder = own_folder(model)
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert not hasattr(ours.config, "quantization_config")
    mine = ours.state_dict()
    assert {name: torch.equal(mine[name], tensor) for name, tensor in theirs.state_dict().items()} == dict.fromkeys(
        mine, True
    )
    assert "lm_head.weight" not in (folder / "model.safetensors").read_bytes()[:4096].decode(errors="ignore"), "tied"


def test_it_is_served_with_its_own_tokenizer_and_template(source):
    from transformers import AutoTokenizer

    server = create_server(model=str(source), gpu_cache="256 tokens", cpu_cache="256 tokens", device="cpu")
    with server as s:
        first = s.generate("a", text="the one", max_new_tokens=6)
        second = s.generate("a", text="and?", max_new_tokens=3)
        engine = s.get_statistics()["engine"]
    assert engine["weights"] == "gguf" and engine["tokenizer"] == "tiny"
    theirs = AutoTokenizer.from_pretrained(own_folder(model_config(str(source))))
    asked = theirs.apply_chat_template(dialogue("the one"), add_generation_prompt=True, return_dict=False)
    assert first.turn.prompt_tokens == len(asked)
    assert second.turn.history_tokens == first.turn.prompt_tokens + len(first.token_ids) - 1
    assert len(set(first.token_ids)) > 2


def test_it_is_dequantised_once(source, conversions):
    folder = gguf.convert(source)
    del conversions[:]
    assert gguf.convert(source) == folder and conversions == []
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name], (
        "nothing half made is left"
    )


def test_a_file_that_lacks_a_tensor_is_not_converted(tmp_path):
    source = write_gguf(tmp_path / "tiny.gguf", without="blk.1.attn_v.weight")
    with pytest.raises(WeightsMissing, match=r"lack model\.layers\.1\.self_attn\.v_proj\.weight; fetch"):
        model_config(str(source))


def test_a_conversion_that_fails_leaves_nothing(tmp_path, cache):
    kept = cache / "pensieve" / "models"  # may be made now: tests come to a worker in any order
    before = sorted(path for path in kept.glob("*") if path.is_dir())
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no such thing")
    with pytest.raises(WeightsMissing, match="not a whole GGUF file"):
        model_config(str(broken))
    assert sorted(path for path in kept.glob("*") if path.is_dir()) == before


def test_the_file_is_the_trials_identity_wherever_it_lies(source, tmp_path):
    def fingerprint(file):
        overrides = ("model=hf", f"model.gguf_file={file}", "hardware=cpu", "cache.gpu=256 tokens")
        return identity_of(plan_trial(checked(*overrides)), resolved(composed(*overrides))).config_hash

    moved = tmp_path / "elsewhere" / "tiny.gguf"
    moved.parent.mkdir()
    moved.write_bytes(source.read_bytes())
    other = write_gguf(tmp_path / "tiny.gguf", seed=1)
    assert fingerprint(source) == fingerprint(moved)
    assert fingerprint(source) != fingerprint(other)


def test_a_file_of_an_installed_package(source, tmp_path, monkeypatch):
    package = tmp_path / "carries_gguf"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('it is found, not imported')")
    (package / "tiny.gguf").write_bytes(source.read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    model = model_config("smollm2_135m_gguf", gguf_file="carries_gguf:tiny.gguf")
    assert weights_identity(model) == weights_identity(model_config(str(source)))
    with pytest.raises(WeightsMissing, match=r"none\.gguf.*does not exist"):
        check_weights(model_config("smollm2_135m_gguf", gguf_file="carries_gguf:none.gguf"))


def test_without_the_packages_that_read_it_it_says_how_to_get_them(tmp_path, monkeypatch):
    file = tmp_path / "other.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineMissing, match=r"pip install 'pensieve-lab\[gguf\]'"):
        gguf.check_gguf(file)


def test_an_engine_of_others_loads_the_folder_of_the_file(source):
    plan = plan_trial(checked("baseline=native_pytorch", "model=hf", f"model.gguf_file={source}", "hardware=cpu"))
    assert plan.config.model.weights == "gguf"
    system = build_outside(plan, build_tokenizer(plan.config.model, plan.model.vocab, simulated=False))
    system.start()
    [turn] = served(system, ask(1, "a", prompt(12, vocab=200), output=3))
    system.close()
    assert (turn.status, turn.output_tokens) == ("completed", 3), turn.error
