"""The chat at a terminal: its commands, Ctrl-C, Ctrl-D, and a script played with and without memory."""

import io

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.console import Console

from pensieve.lab.compose.conf import conf_folder
from pensieve.serve.server import create_server
from pensieve.serve.server.api import Stream
from pensieve.serve.server.chat import ChatSettings, Conversation, chat
from tests.server.live import SIMULATED

SETTINGS = ChatSettings(max_new_tokens=6, temperature=0.0)


def lines(*said):
    """What is typed, line by line; an exception is raised; then Ctrl-D."""
    rest = iter(said)

    def read():
        line = next(rest, EOFError())
        if isinstance(line, BaseException):
            raise line
        return str(line)

    return read


@pytest.fixture
def talk():
    with create_server(**SIMULATED) as server:

        def run(*said, settings=SETTINGS):
            out = Console(file=io.StringIO(), width=200)
            Conversation(server, settings, out).run(lines(*said))
            return out.file.getvalue()

        run.server = server
        yield run


def test_turns_stats_and_reset(talk):
    said = talk("Hello", "And you?", "stats", "reset", "stats", "exit", "never read")
    before, after = said.split("The conversation begins anew.")
    turns = [line.split() for line in before.splitlines() if line.startswith((" 1 ", " 2 "))]
    assert [(int(turn[4]) > 0, int(turn[8]) > 0) for turn in turns] == [(False, True), (True, True)], "on GPU, and new"
    assert "missed" in before and "2 turns" in before
    assert "missed" not in after, "no turn yet"
    assert talk.server.conversations.find("", "chat") is None


def test_the_system_message_is_said_once(talk):
    settings = ChatSettings(system="Be brief.", max_new_tokens=4, temperature=0.0)
    talk("Hello", "Again", settings=settings)
    known = talk.server.conversations.find("", "chat")
    text = talk.server.tokenizer.decode(known.tokens)
    assert text.startswith("System: Be brief.\nUser: Hello\nAssistant:")
    assert text.count("System:") == 1
    assert [message["role"] for message in known.messages] == ["system", *["user", "assistant"] * 2]


def test_ctrl_c_stops_the_reply_and_not_the_program(talk, monkeypatch):
    ended = []

    def pieces(stream):
        yield "some"
        raise KeyboardInterrupt

    cancel = Stream.cancel
    monkeypatch.setattr(Stream, "__iter__", pieces)
    monkeypatch.setattr(Stream, "cancel", lambda stream: (ended.append(stream), cancel(stream)))
    said = talk("Hello", KeyboardInterrupt(), "reset")
    assert "some (stopped)\n" in said and "begins anew" in said
    assert len(ended) == 1


def composed(*overrides):
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = OmegaConf.to_container(compose("chat", overrides=list(overrides)), resolve=True)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def test_five_questions_are_played_with_and_without_memory(capsys):
    config = composed("hardware=sim_h100", "chat.script=five", "chat.max_new_tokens=8", "chat.temperature=0")
    assert chat(config, {"model"}) == 0
    shown = capsys.readouterr().out
    assert "pensieve" in shown and "stateless" in shown
    assert shown.count("the same") == 5
    ratios = [float(word[:-1]) for word in shown.split() if word.endswith("x") and word[:-1].replace(".", "").isdigit()]
    assert len(ratios) == 5
    assert ratios[0] == pytest.approx(1.0, abs=0.01), "the first turn has nothing to remember"


def test_replies_are_compared_in_float32(tmp_path, monkeypatch):
    """On a real machine, which a simulated one stands in for: greedily, where nothing else was asked for."""
    asked = []
    ask = Conversation.ask

    def real(trial):
        server = create_server(**SIMULATED)
        settings = {**server.system.settings(), "simulated": False, "dtype": trial["model"]["dtype"]}
        monkeypatch.setattr(server.system, "settings", lambda: settings)
        return server

    def watched(self, text):
        stream = ask(self, text)
        asked.append((self._server.system.settings()["dtype"], stream.turn.sampling.temperature))
        return stream

    monkeypatch.setattr("pensieve.serve.server.chat.server_of", real)
    monkeypatch.setattr(Conversation, "ask", watched)
    (tmp_path / "two").write_text("One?\n\nTwo?\n")
    config = composed("hardware=cpu", f"chat.script={tmp_path / 'two'}", "chat.max_new_tokens=3")
    assert chat(config, {"model"}) == 0
    assert asked == [("float32", 0.0)] * 6, "with the one that warms up, of each"
