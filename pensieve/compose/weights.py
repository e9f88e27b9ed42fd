"""Find a model's weights, architecture and tokenizer, and check before anything starts that they can be loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pensieve.compose.folder import conf_folder, ended, nearest, options, read_option
from pensieve.compose.schema import ModelConfig
from pensieve.errors import ConfigError, WeightsMissing
from pensieve.tokenizer import find_tokenizer_file

_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


def model_config(source: str, **changes: Any) -> ModelConfig:
    """A model by its name in conf/model, by the folder that save_pretrained wrote, or by its hub id.

    `changes` replace fields of it (weights, seed, dtype). For a folder, weights=hub means the folder's own weights; its
    tokenizer is used whatever the weights are. Raises ConfigError for an unknown name, WeightsMissing
    where the hub cannot be asked.
    """
    if (conf_folder() / "model" / f"{source}.yaml").is_file():
        return ModelConfig.model_validate({**read_option("model", source), **changes})
    if Path(source).expanduser().is_dir():
        architecture = folder_architecture(source)
        fields = {"name": Path(source).expanduser().resolve().name, "weights": source, "architecture": architecture}
        if find_tokenizer_file(source) is not None:
            fields["tokenizer"] = source
        if changes.get("weights") == "hub":
            changes["weights"] = source
        return ModelConfig.model_validate({**fields, **changes})
    if source.count("/") != 1:
        raise ConfigError(ended(f"There is no model {source!r}{nearest(source, options('model'))}"))
    fields = {"name": source.replace("/", "--"), "hub_id": source, "architecture": _hub_architecture(source)}
    return ModelConfig.model_validate({**fields, **changes})


def weights_kind(model: ModelConfig) -> str:
    """hub, random or path."""
    return model.weights if model.weights in ("hub", "random") else "path"


def folder_architecture(folder: str) -> dict[str, Any]:
    """config.json of a folder. Raises WeightsMissing where there is none."""
    file = Path(folder).expanduser() / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsMissing(
            f"{folder} is not a model folder: config.json cannot be read; give a folder that save_pretrained wrote, "
            "model.weights=hub or model.weights=random."
        ) from error
    assert isinstance(content, dict)
    return content


def local_weights(model: ModelConfig) -> Path | None:
    """The safetensors file (or its index) on this machine: in the folder, or in the local hub cache."""
    if weights_kind(model) == "path":
        folder = Path(model.weights).expanduser()
        return next((folder / name for name in _WEIGHT_FILES if (folder / name).is_file()), None)
    if not model.hub_id:
        return None
    from huggingface_hub import try_to_load_from_cache

    for name in _WEIGHT_FILES:
        found = try_to_load_from_cache(model.hub_id, name, revision=model.revision)
        if isinstance(found, str):
            return Path(found)
    return None


def check_weights(model: ModelConfig) -> None:
    """Raise WeightsMissing where loading would fail because files, access or network are missing."""
    kind = weights_kind(model)
    if kind == "random":
        return
    if kind == "path":
        folder_architecture(model.weights)
        if local_weights(model) is None:
            raise WeightsMissing(f"{model.weights} holds no safetensors; save the model with save_pretrained first.")
        return
    if not model.hub_id:
        raise WeightsMissing(f"Model {model.name} has no published weights; use model.weights=random.")
    if local_weights(model) is None:
        _ask_hub(model)


def _ask_hub(model: ModelConfig) -> None:
    assert model.hub_id is not None
    why = _refusal(model.hub_id, model.revision)
    if why:
        raise WeightsMissing(
            f"The weights of {model.hub_id} cannot be had: {why}; use model.weights=random "
            "(same speed, meaningless text) or model.weights=<a folder with safetensors>."
        )


def _refusal(hub_id: str, revision: str | None = None) -> str | None:
    """Why the hub does not give a model, a clause; None where it does. It is asked once: a download tries six times."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        HfApi().model_info(hub_id, revision=revision, timeout=10)
        HfApi().auth_check(hub_id)
    except GatedRepoError:
        return "they need an accepted licence and a token (huggingface-cli login)"
    except RepositoryNotFoundError:
        return "the hub knows no such model, or not for you"
    except OfflineModeIsEnabled:
        return "they are not on this machine and HF_HUB_OFFLINE is set"
    except Exception as error:  # the hub's client lets several network libraries' errors through
        return f"they are not on this machine and the hub cannot be reached ({type(error).__name__})"
    return None


def _hub_architecture(hub_id: str) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, "config.json")
    if not isinstance(found, str):
        why = _refusal(hub_id)
        if why:
            raise WeightsMissing(
                f"{hub_id} is not in conf/model, and its files cannot be had: {why}; choose one of: "
                f"{', '.join(options('model'))}."
            )
        found = hf_hub_download(hub_id, "config.json")
    content = json.loads(Path(found).read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content
