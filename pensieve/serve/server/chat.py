"""Talk to a model in the terminal, or play a script through it with and without memory, side by side."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TextIO

from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table

from pensieve.core.request import Free
from pensieve.errors import ConfigError, PensieveError
from pensieve.lab.compose.conf import read_option
from pensieve.lab.compose.model_files import check_weights, model_config
from pensieve.lab.compose.settings import check_node
from pensieve.lab.trial.terminal import console, say
from pensieve.serve.record import TurnRecord
from pensieve.serve.server.api import Server, Stream
from pensieve.serve.server.create import server_of
from pensieve.specs import ROUNDS_APART, SIXTEEN_BITS

SHIPPED = "five"
SMALL_MODEL = "smollm2_135m_gguf"
WITHOUT_MEMORY = "stateless"
COMMANDS = "stats: where each prompt was found; reset: begin anew; exit (or Ctrl-D): leave; Ctrl-C: stop a reply."
_NAME = "chat"


class ChatSettings(BaseModel):
    """The node `chat` of conf/chat.yaml. temperature, top_p: see Server.sampling; a script's temperature is 0 unless it is
    given, so that replies can be compared."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    system: str | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    script: str | None = None


def chat(config: Mapping[str, Any], typed: Collection[str] = ()) -> int:
    """typed: the fields and groups that the command line gives. Returns the exit status."""
    settings = check_node(ChatSettings, config, "chat")
    trial = dict(config)
    if not any(name.partition(".")[0] == "model" for name in typed):
        trial["model"], sentence = small_model()
        if sentence:
            say(sentence)
    if settings.script is not None:
        return play(trial, settings, questions_of(settings.script))
    with server_of(trial, say=say) as server:
        say(f"{trial['model']['name']}, baseline={trial['baseline']['name']}. {COMMANDS}")
        with suppress(ImportError):  # not on every system: lines are edited, and those before come back
            import readline  # noqa: F401
        Conversation(server, settings, sys.stdout).run(partial(input, ">>> " if sys.stdin.isatty() else ""))
    return 0


def small_model() -> tuple[dict[str, Any], str | None]:
    """A model that answers in English where its weights are at hand, else the tiny one and a sentence about it."""
    try:
        found = model_config(SMALL_MODEL)
        check_weights(found)
    except PensieveError as error:
        tiny = model_config("tiny").model_dump()
        return tiny, f"The tiny model answers, whose weights are random and whose text means nothing. {error}"
    return found.model_dump(), None


def questions_of(script: str) -> list[str]:
    """The lines of a file that are not empty. Raises ConfigError."""
    shipped = script == SHIPPED and not Path(script).exists()
    file = files("pensieve.serve.server").joinpath(f"{SHIPPED}.txt") if shipped else Path(script).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat.script={script} cannot be read ({error}); give a text file with a question a line, or {SHIPPED}."
        ) from None
    questions = [line.strip() for line in text.splitlines() if line.strip()]
    if not questions:
        raise ConfigError(f"chat.script={script} holds no question; write one a line.")
    return questions


class Conversation:
    """One conversation at the terminal."""

    def __init__(self, server: Server, settings: ChatSettings, out: TextIO) -> None:
        self._server, self._settings, self._out = server, settings, out
        self._turns: list[TurnRecord] = []

    def run(self, read: Callable[[], str]) -> None:
        """Answer lines until `exit` or the end of input. Ctrl-C at the prompt gives up the line."""
        while True:
            try:
                line = read().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                continue
            if line == "exit":
                return
            if line == "stats":
                self._print(self.stats())
            elif line == "reset":
                self.reset()
                self._print("The conversation begins anew.")
            elif line:
                self._answer(line)

    def reset(self) -> None:
        self._server.forget(_NAME)
        self._turns = []

    def ask(self, text: str) -> Stream:
        """The reply to one message of the user."""
        s, messages = self._settings, [{"role": "user", "content": text}]
        if s.system is not None and not self._turns:
            messages.insert(0, {"role": "system", "content": s.system})
        output = Free(s.max_new_tokens, self._server.stops(()))
        stream = Stream(self._server.turn(output, self._server.sampling(s.temperature, s.top_p), fits=True))
        self._server.conversations.chat(stream.turn, "", _NAME, list(messages), whole=False)
        return stream

    def took(self, stream: Stream) -> TurnRecord:
        """Remember a finished turn."""
        record = stream.result().turn
        if record.stands:
            self._turns.append(record)
        return record

    def stats(self) -> str:
        """A line a turn, and those of the server."""
        if not self._turns:
            return "No turn yet."
        lines = [f"turn {number}: {_told(turn)}" for number, turn in enumerate(self._turns, start=1)]
        return "\n".join([*lines, self._server.get_statistics_str()])

    def _answer(self, text: str) -> None:
        try:
            stream = self.ask(text)
            try:
                for piece in stream:
                    self._out.write(piece)
                    self._out.flush()
            except KeyboardInterrupt:
                stream.cancel()
                self._out.write(" (stopped)")
            self._print("")
            self.took(stream)
        except PensieveError as error:
            self._print(str(error))

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def _told(r: TurnRecord) -> str:
    """A turn and its ledger, on a line."""
    missed: Counter[str] = Counter()
    for miss in r.misses:
        missed[miss.cause] += miss.tokens
    return (
        f"{r.ttft_ms or 0:.1f} ms to the first of {r.output_tokens} tokens; prompt {r.prompt_tokens} tokens: "
        f"{r.gpu_hit_tokens} on GPU, {r.cpu_hit_tokens} on CPU, {r.disk_hit_tokens} on disk, "
        f"{r.recomputed_tokens} recomputed, {r.new_tokens} new "
        f"[missed {', '.join(f'{cause} {tokens}' for cause, tokens in missed.items())}]"
    )


def play(trial: Mapping[str, Any], settings: ChatSettings, questions: Sequence[str]) -> int:
    """The same questions, one conversation: with the baseline of the configuration, then without memory. In float32 and
    greedily, where nothing else was asked for: but for a tie in rounding, a reply that differs is then a fault."""
    name = str(trial["baseline"]["name"])
    if trial["model"]["dtype"] == "auto" and not trial["hardware"]["simulated"]:
        trial = {**trial, "model": {**trial["model"], "dtype": "float32"}}
    if settings.temperature is None:
        settings = settings.model_copy(update={"temperature": 0.0})
    rounds = False
    played: dict[str, list[tuple[TurnRecord, str]]] = {}
    for baseline in dict.fromkeys((name, WITHOUT_MEMORY)):
        with server_of({**trial, "baseline": read_option("baseline", baseline)}, say=say) as server:
            conversation = Conversation(server, settings, sys.stdout)
            conversation.ask("Hello").result()  # the first forward of a process is no turn
            conversation.reset()
            ran = server.system.settings()
            rounds = ran["dtype"] in SIXTEEN_BITS and not ran["simulated"]
            played[baseline] = []
            for question in questions:
                stream = conversation.ask(question)
                result = stream.result()
                played[baseline].append((conversation.took(stream), result.text.strip()))
    console().print(_side_by_side(questions, played))
    if rounds:
        say(ROUNDS_APART)
    return 0


def _side_by_side(questions: Sequence[str], played: Mapping[str, Sequence[tuple[TurnRecord, str]]]) -> Table:
    table = Table(title="Time to first token by turn, ms", show_lines=True)
    for title in ("turn", "question", *(f"{baseline}: reply" for baseline in played)):
        table.add_column(title)
    for title in (*played, "speed-up"):
        table.add_column(title, justify="right")
    for number, question in enumerate(questions):
        turns = [turns[number] for turns in played.values()]
        ttft = [record.ttft_ms or float("nan") for record, _ in turns]
        texts = [text for _, text in turns]
        texts[1:] = ["the same" if text == texts[0] else text for text in texts[1:]]
        table.add_row(str(number + 1), question, *texts, *(f"{ms:.1f}" for ms in ttft), f"{ttft[-1] / ttft[0]:.2f}x")
    return table
