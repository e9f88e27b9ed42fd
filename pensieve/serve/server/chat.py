"""Talk to a model in the terminal, or play a script through it with and without memory, side by side."""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.markup import escape

from pensieve.core.request import Free
from pensieve.errors import ConfigError, PensieveError
from pensieve.lab.compose.conf import read_option
from pensieve.lab.compose.model_files import check_weights, model_config
from pensieve.lab.compose.settings import check_node
from pensieve.lab.trial.terminal import console, say
from pensieve.serve.server.api import Generation, Server, Stream, server_of
from pensieve.specs import ROUNDS_APART, SIXTEEN_BITS
from pensieve.units import grid, three_digits

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
    with server_of(trial) as server:
        say(f"{trial['model']['name']}, baseline={trial['baseline']['name']}. {COMMANDS}")
        with suppress(ImportError):  # not on every system: lines are edited, and those before come back
            import readline  # noqa: F401
        Conversation(server, settings, console()).run(partial(input, ">>> " if sys.stdin.isatty() else ""))
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

    def __init__(self, server: Server, settings: ChatSettings, out: Console) -> None:
        self._server, self._settings, self._out = server, settings, out

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
                self._stats()
            elif line == "reset":
                self._server.forget(_NAME)
                self._out.print("The conversation begins anew.")
            elif line:
                self._answer(line)

    def ask(self, text: str) -> Stream:
        """The reply to one message of the user."""
        s, messages = self._settings, [{"role": "user", "content": text}]
        if s.system is not None and self._server.conversations.find("", _NAME) is None:
            messages.insert(0, {"role": "system", "content": s.system})
        output = Free(s.max_new_tokens, self._server.stops(()))
        stream = Stream(self._server.turn(output, self._server.sampling(s.temperature, s.top_p), fits=True))
        self._server.conversations.chat(stream.turn, "", _NAME, list(messages), whole=False)
        return stream

    def _stats(self) -> None:
        """Of each turn where its prompt was found, and why what was nowhere was not."""
        lines, known = [], self._server.conversations.find("", _NAME)
        for number, mark in enumerate(known.marks if known is not None else (), start=1):
            told = mark.told
            found = {
                name: str(count) for name, count in told["prompt_tokens_details"].items() if name != "cached_tokens"
            }
            sizes = {"reply": str(told["output_tokens"]), "prompt": str(told["prompt_tokens"])}
            missed = ", ".join(f"{miss['cause']} {miss['tokens']}" for miss in told["misses"])
            ttft = three_digits(told["ttft_ms"])
            lines.append({"turn": str(number), "TTFT, ms": ttft, **sizes, **found, "missed": missed})
        if lines:
            self._out.print(grid(lines, fold=True))
        self._out.print(self._server.get_statistics_str(), markup=False, highlight=False, soft_wrap=True)

    def _answer(self, text: str) -> None:
        try:
            stream = self.ask(text)
            try:
                for piece in stream:
                    self._out.out(piece, end="", highlight=False)
            except KeyboardInterrupt:
                stream.cancel()
                self._out.out(" (stopped)", end="", highlight=False)
            self._out.print()
            stream.result()
        except PensieveError as error:
            self._out.print(str(error), markup=False)


def play(trial: Mapping[str, Any], settings: ChatSettings, questions: Sequence[str]) -> int:
    """The same questions, one conversation: with the baseline of the configuration, then without memory. In float32 and
    greedily, where nothing else was asked for: but for a tie in rounding, a reply that differs is then a fault."""
    name = str(trial["baseline"]["name"])
    if trial["model"]["dtype"] == "auto" and not trial["hardware"]["simulated"]:
        trial = {**trial, "model": {**trial["model"], "dtype": "float32"}}
    if settings.temperature is None:
        settings = settings.model_copy(update={"temperature": 0.0})
    rounds = False
    played: dict[str, list[Generation]] = {}
    for baseline in dict.fromkeys((name, WITHOUT_MEMORY)):
        with server_of({**trial, "baseline": read_option("baseline", baseline)}) as server:
            conversation = Conversation(server, settings, console())
            conversation.ask("Hello").result()  # the first forward of a process is no turn
            server.forget(_NAME)
            ran = server.system.settings()
            rounds = ran["dtype"] in SIXTEEN_BITS and not ran["simulated"]
            played[baseline] = [conversation.ask(question).result() for question in questions]
    lines = []
    for number, (question, *said) in enumerate(zip(questions, *played.values(), strict=True), start=1):
        texts, ttft = [one.text.strip() for one in said], [one.turn.ttft_ms or float("nan") for one in said]
        shown = [texts[0], *("the same" if text == texts[0] else text for text in texts[1:])]
        replies = {f"{baseline}: reply": escape(text) for baseline, text in zip(played, shown, strict=True)}
        times = {f"{baseline}, ms": three_digits(ms) for baseline, ms in zip(played, ttft, strict=True)}
        speed_up = f"{ttft[-1] / ttft[0]:.2f}x"
        lines.append({"turn": str(number), "question": escape(question), **replies, **times, "speed-up": speed_up})
    left = ("question", *(f"{baseline}: reply" for baseline in played))
    console().print(grid(lines, "Replies, and times to first token", left, fold=True))
    if rounds:
        say(ROUNDS_APART)
    return 0
