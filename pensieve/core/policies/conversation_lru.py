"""Whole sessions, oldest first, as CachedAttention does (Gao et al., USENIX ATC 2024)."""

from __future__ import annotations

from pensieve.core.policies.lru import Lru


class ConversationLru(Lru):
    """A session that lost one chunk loses all of them in the same choice."""

    whole_conversations = True
