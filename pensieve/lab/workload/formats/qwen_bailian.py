"""Qwen-Bailian's usage traces: JSON lines with chat and parent chat, a time in seconds, and a hash for each 16 tokens."""

from __future__ import annotations

from dataclasses import dataclass

from pensieve.core.request import TokenArray
from pensieve.lab.workload.formats.reading import Reader, Row, hash_list, number, whole
from pensieve.lab.workload.recording import Blocks, Call, Conversation, Recording, hashes_of

BLOCK_TOKENS = 16
NO_PARENT = -1
RULE = (
    "A request continues the conversation of its parent chat; one without a parent, or whose parent is not in the file, "
    "opens a conversation. Every request carries its whole prompt; equal block hashes give equal tokens; replies are not "
    "found again in later prompts, whose blocks are the trace's."
)


@dataclass(frozen=True, slots=True)
class _Line:
    chat: int
    parent: int
    turn: int
    at_s: float
    input_length: int
    output_length: int
    hashes: TokenArray[int]


def read(reader: Reader) -> Recording:
    lines = sorted(reader.json_lines(_line), key=lambda line: (line.at_s, line.turn))
    first = lines[0].at_s if lines else 0.0
    root: dict[int, int] = {}
    calls: dict[int, list[Call]] = {}
    orphans = 0
    for order, line in enumerate(lines):
        opens = line.parent not in root
        orphans += opens and line.parent != NO_PARENT
        root[line.chat] = line.chat if opens else root[line.parent]
        content = Blocks(line.hashes, BLOCK_TOKENS, line.input_length)
        call = Call(content, line.output_length, line.at_s - first, continues=False, order=order)
        calls.setdefault(root[line.chat], []).append(call)
    return reader.recording(
        format="qwen_bailian",
        conversations=tuple(Conversation(f"qwen-{chat}", tuple(each)) for chat, each in calls.items()),
        rule=RULE,
        facts={"requests_whose_parent_is_not_in_the_file": orphans},
    )


def _line(row: Row) -> _Line:
    return _Line(
        chat=whole(row, "chat_id"),
        parent=whole(row, "parent_chat_id", NO_PARENT),
        turn=whole(row, "turn"),
        at_s=number(row, "timestamp"),
        input_length=whole(row, "input_length", 1),
        output_length=whole(row, "output_length"),
        hashes=hashes_of(hash_list(row, "hash_ids")),
    )
