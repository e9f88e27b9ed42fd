"""What a server tells of a conversation: its turns, where its prompt tokens were found, and where its KV is now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pensieve.serve.record import TurnRecord
from pensieve.serve.server.api import Server
from pensieve.serve.server.conversations import Conversation
from pensieve.serve.server.schemas import prompt_details

_TOLD = ("status", "finish_reason", "ttft_ms", "latency_ms", "queue_ms", "prompt_tokens", "output_tokens")


def session_line(server: Server, conversation: Conversation) -> dict[str, Any]:
    """An entry of /v1/sessions. kv: where each chunk is, see CacheManager.places."""
    return {
        "id": conversation.id,
        "object": "session",
        "created_at": int(conversation.created_at),
        "used_at": int(conversation.used_at),
        "turns": len(conversation.marks),
        "tokens": len(conversation.tokens),
        "busy": not conversation.idle,
        "forked_from": conversation.parent,
        "kv": server.places(conversation),
    }


def session_body(server: Server, conversation: Conversation) -> dict[str, Any]:
    names = {one.engine_name: one.id for one in server.conversations.of(conversation.tenant)}  # and of nobody else
    marks = list(conversation.marks)
    turns = [turn_body(server, names, number, mark.turn) for number, mark in enumerate(marks, start=1)]
    return {
        **session_line(server, conversation),
        "keep_alive": conversation.keep_alive_s,
        "chunk_tokens": server.chunk_tokens,
        "statistics": turns,
    }


def turn_body(server: Server, names: Mapping[str, str], number: int, turn: TurnRecord) -> dict[str, Any]:
    """names: of conversations that may be told of, by their names in the engine."""
    return {
        "turn": number,
        **{name: getattr(turn, name) for name in _TOLD},
        "prompt_tokens_details": prompt_details(turn),
        "misses": [
            {
                "cause": miss.cause,
                "tokens": miss.tokens,
                "ms": miss.ms,
                "evicted_by": names.get(miss.evicted_by or ""),
                "evicted_at": miss.evicted_s and server.moment(miss.evicted_s),
            }
            for miss in turn.misses
        ],
    }
