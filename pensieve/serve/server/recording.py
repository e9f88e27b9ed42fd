"""serve.record=FILE: live turns as recorded traffic (pensieve/lab/traffic)."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pensieve import __version__
from pensieve.lab.traffic.hashing import BLOCK_TOKENS, TOKEN_BYTES, Salt
from pensieve.lab.traffic.journal import COMMIT_S, Journal
from pensieve.lab.traffic.table import Exchange, Facts, Status
from pensieve.serve.record import TurnRecord
from pensieve.serve.server.api import Server, Turn

_STATUS: dict[str, Status] = {"completed": "completed", "cancelled": "cancelled", "timeout": "cancelled"}


class Recording:
    """Turns that ended go to a thread of its own, which hashes and writes them: no client waits for that. Neither texts nor
    tokens are kept. Raises ConfigError where the file cannot be made."""

    def __init__(self, server: Server, path: Path, config: Mapping[str, Any]) -> None:
        """config: of the command, for the name of its policy."""
        settings, clock = server.system.settings(), server.system.clock
        known = {name: settings.get(name) for name in ("gpu_tokens", "cpu_tokens", "disk_tokens")}
        names = {name: config[name]["name"] for name in ("baseline", "eviction", "model")}
        engine = {"name": "pensieve", "version": __version__, "policy": names["eviction"], **names, **known}
        engine["block_tokens"] = config["cache"]["chunk_tokens"]
        self._origin_s = clock.now_s()
        facts = Facts("serve", block=BLOCK_TOKENS, engine=engine, started_unix_s=server.moment(self._origin_s))
        self._journal, self._salt = Journal(path, facts), Salt()
        self.path = self._journal.path
        self._turns: queue.SimpleQueue[tuple[Turn, TurnRecord] | None] = queue.SimpleQueue()  # None: the end
        self._thread = threading.Thread(target=self._write, name="pensieve-recording", daemon=True)
        self._thread.start()
        server.observe(lambda turn, record: self._turns.put((turn, record)))

    def close(self) -> None:
        """Write the turns that have ended, and complete the file."""
        self._turns.put(None)
        self._thread.join()
        self._journal.close()

    def _write(self) -> None:
        number = 0
        while (ended := self._turns.get()) is not None:
            self._journal.put(self._row(number, *ended))
            number += 1
            if self._turns.empty():
                time.sleep(COMMIT_S / 2)
                self._journal.commit()

    def _row(self, number: int, turn: Turn, record: TurnRecord) -> Exchange:
        prompt = turn.asked.prompt if turn.asked is not None else None
        said = [record.gpu_hit_tokens, record.cpu_hit_tokens, record.disk_hit_tokens]
        row = Exchange(number, record.intended_s - self._origin_s, status=_STATUS.get(record.status, "failed"))
        row.first_token_s, row.end_s = self._time(record.first_token_s), self._time(record.finished_s)
        row.session, row.session_from = self._salt.name(turn.conversation.id), "server"
        row.tenant = self._salt.name(turn.conversation.tenant) if turn.conversation.tenant else None
        row.finish_reason, row.output_tokens = record.finish_reason, record.output_tokens
        row.cached_gpu_tokens, row.cached_cpu_tokens, row.cached_disk_tokens = said
        row.cached_tokens = None if said[0] is None else sum(one or 0 for one in said)
        if prompt is not None:
            size = BLOCK_TOKENS * TOKEN_BYTES
            row.prompt_tokens, row.blocks = len(prompt), self._salt.blocks(prompt.tobytes(), size)
            row.output_blocks = self._salt.blocks((prompt + record.token_ids).tobytes(), size, len(row.blocks))
        return row

    def _time(self, clock_s: float | None) -> float | None:
        return None if clock_s is None else clock_s - self._origin_s
