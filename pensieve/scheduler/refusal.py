"""Requests that can never be served."""

from __future__ import annotations

from pensieve.errors import CapacityError, ContextLengthError, RequestRefused
from pensieve.scheduler.sequence import Sequence
from pensieve.units import ceil_div


def refusal(sequence: Sequence, chunk_tokens: int, request_blocks: int, max_context: int) -> RequestRefused | None:
    """Why this request cannot be served even alone on the device, or None. Read when it arrives and again when it is its
    turn, since its conversation may have grown in between."""
    length, new = sequence.prompt_length(), sequence.request.output.max_new_tokens
    if length < 1:
        return RequestRefused("The prompt is empty; send at least one token.")
    if length + new > max_context:
        return ContextLengthError(
            f"Prompt and output are {length} + {new} tokens, but the model's context is {max_context}; "
            "shorten the conversation or ask for fewer tokens."
        )
    # The last token of a turn gets no KV; admission reserves one position beyond the prompt.
    blocks = ceil_div(length + max(new - 1, 1), chunk_tokens)
    if blocks > request_blocks:
        return CapacityError(
            f"The request needs {blocks * chunk_tokens} tokens of KV, and one request can have "
            f"{request_blocks * chunk_tokens} on the GPU tier; raise cache.gpu (gpu_cache of "
            "create_server) or shorten the conversation."
        )
    return None
