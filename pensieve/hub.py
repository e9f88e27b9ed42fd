"""Files that this machine keeps: of a model's repository, from the hub's cache here, else from the hub, which is asked once;
and the user's cache folder, of what can be made again (compiled kernels, digests of large files).
"""

import os
from collections.abc import Callable
from pathlib import Path

from pensieve.errors import WeightsMissing

SETTINGS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt", "vocab.txt", "*.model",
)  # fmt: skip
"""Everything of a model but its weights: a few megabytes."""

_TIMEOUT_S = 10.0

_answers: dict[tuple[str, str | None], tuple[str | None, str | None]] = {}
"""Of the hub, by repository and revision: why not, and the commit where it can be read."""


def cached_snapshot(hub_id: str, revision: str | None = None) -> Path | None:
    """The folder that the hub's cache on this machine has for a repository, perhaps with some of its files only.

    A repository that was never fetched has no folder there, which is seen without importing what fetches them.
    """
    from huggingface_hub import constants

    if not (Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}").is_dir():
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def commit(hub_id: str, revision: str | None = None) -> str | None:
    """The commit that a repository stands at: of the cached snapshot, else as the hub answered before. Asks nobody."""
    folder = cached_snapshot(hub_id, revision)
    return folder.name if folder is not None else _answers.get((hub_id, revision), (None, None))[1]


def why_not(hub_id: str, revision: str | None = None) -> str | None:
    """Why a repository cannot be read from the hub, as the end of a sentence; None where it can.

    One request without retries, so that no network means a sentence in seconds and not minutes of attempts. The answer is
    remembered: what a command needs of a model that cannot be had is not asked for again.
    """
    if (hub_id, revision) not in _answers:
        _answers[hub_id, revision] = _ask(hub_id, revision)
    return _answers[hub_id, revision][0]


def settings_folder(hub_id: str, revision: str | None, enough: Callable[[Path], bool], what: str, instead: str) -> Path:
    """The folder with a repository's small files, downloaded where the cache lacks what is asked for.

    enough: whether a folder has it. what, instead: for the error ("The architecture", "use model.weights=random").
    Raises WeightsMissing where it cannot be had.
    """
    folder = cached_snapshot(hub_id, revision)
    if folder is not None and enough(folder):
        return folder
    reason = why_not(hub_id, revision)
    if reason is None:
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(SETTINGS)))
        except Exception as error:  # as in _ask
            reason = first_line(error)
        else:
            if enough(folder):
                return folder
            reason = "its repository has none"
    raise WeightsMissing(f"{what} of {hub_id} cannot be had: {reason}; {instead}.")


def _ask(hub_id: str, revision: str | None) -> tuple[str | None, str | None]:
    from huggingface_hub import HfApi, errors

    reasons = {  # a class before those that it is made of
        errors.OfflineModeIsEnabled: "it is not in the hub's cache on this machine, and HF_HUB_OFFLINE is set",
        errors.GatedRepoError: "its licence must be accepted on its page first, and a token given (huggingface-cli login)",
        errors.RevisionNotFoundError: "it has no revision {revision}",
        errors.RepositoryNotFoundError: "the hub knows no such model, or not for you (huggingface-cli login)",
        errors.HFValidationError: "that is no hub id ({said})",
        errors.HfHubHTTPError: "the hub answered: {said}",
        # The hub's HTTP client, whichever it is, has an error class of its own for each way to fail.
        Exception: "it is not in the hub's cache on this machine, and the hub cannot be reached ({kind})",
    }
    api = HfApi()
    try:
        commit = api.model_info(hub_id, revision=revision, timeout=_TIMEOUT_S).sha
        api.auth_check(hub_id)
    except Exception as error:
        reason = next(text for kind, text in reasons.items() if isinstance(error, kind))
        return reason.format(said=first_line(error), kind=type(error).__name__, revision=revision), None
    return None, commit


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def user_cache() -> Path:
    """Path of the user's cache folder, which is not made here. Raises RuntimeError for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pensieve"
