"""The command `pensieve`: one function for each verb; runners/<verb>.py call the same functions from a checkout.

A verb imports what it needs when it is called: a package that is missing is then named in one sentence.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

_TYPED = tuple(sys.argv)  # the command with its arguments, before a verb takes its own


@contextmanager
def _imports() -> Iterator[None]:
    """What is missing here may be in the .venv of the checkout: go on there, or say in a sentence what to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        environment = Path(__file__).resolve().parents[1] / ".venv"
        python = environment / "bin" / "python"
        missing = f"The Python package {error.name} is not installed"
        if not python.is_file():
            sys.exit(f"{missing} for {sys.executable}; type `make install`, then `source .venv/bin/activate`.")
        if environment.samefile(sys.prefix):
            sys.exit(f"{missing} in {environment}; type `make install` and run again.")
        print(f"{missing} for {sys.executable}; going on with {python}.", file=sys.stderr, flush=True)
        os.execv(python, [str(python), *_TYPED])


def main() -> None:
    """The console script: pensieve VERB, with the arguments of runners/VERB.py."""
    verbs = {
        verb.__name__: verb
        for verb in (demo, run, size, advise, serve, record, chat, compare, results, mlflow, bench, profile, doctor)
    }
    parser = argparse.ArgumentParser(
        prog="pensieve",
        epilog="\n".join(f"{name:<9}{verb.__doc__}" for name, verb in verbs.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", choices=verbs, help="pensieve VERB --help lists the verb's arguments")
    verb = parser.parse_args(sys.argv[1:2]).verb
    sys.argv = [f"pensieve {verb}", *sys.argv[2:]]
    sys.exit(verbs[verb]())


def demo() -> int:
    """Four baselines, long conversations, a tiny model: what make demo runs. [seed=0] [group.field=value]."""
    parser = argparse.ArgumentParser(
        description=demo.__doc__, epilog="The same as pensieve run -m experiment=demo; pensieve run --help lists all."
    )
    _, words = parser.parse_known_args()
    sys.argv = ["pensieve run", "-m", "experiment=demo", *words]
    return run()


def run() -> int:
    """One trial, or with -m a sweep: [group=option] [group.field=value] [-m]."""
    return _hydra("config", _run_job)


def _run_job(cfg: DictConfig) -> None:
    """Hydra has composed the configuration: only now is more than Hydra needed."""
    _imported("pensieve.lab.trial.command", "run_job")(cfg)


def size() -> int:
    """How much KV cache a load needs, as a map: [group=option] [size.gpu=[...]] [slo.ttft_ms=500]."""
    return _composed("size", lambda cfg: _imported("pensieve.lab.commands.size", "size_command")(cfg))


def advise() -> int:
    """What recorded traffic lost in the cache, and what would help: FILE [group=option] [engine=vllm blocks=N]."""
    given = [
        [text] if "=" in text or text[:1] == "-" else ["workload=trace", f"workload.path={text}"]
        for text in sys.argv[1:]
    ]
    sys.argv[1:] = [text for texts in given for text in texts]
    return _composed("advise", lambda cfg: _imported("pensieve.lab.commands.advise.page", "advise_page")(cfg))


def bench() -> int:
    """Benchmarks beside their limits and peers: target=all."""
    return _live("bench", "pensieve.lab.bench.session", "run_target")


def serve() -> int:
    """A server with the API of OpenAI: [group=option] [serve.port=8000]."""
    return _live("serve", "pensieve.serve.server.app", "serve")


def chat() -> int:
    """Talk to a model in the terminal: [group=option] [chat.script=FILE]."""
    return _live("chat", "pensieve.serve.server.chat", "chat")


def profile() -> int:
    """Measure this machine for its cost model and for simulating it: [group=option] [profile.to=FILE]."""
    return _live("profile", "pensieve.lab.trial.machine", "profile")


def _live(verb: str, module: str, function: str) -> int:
    """Run that function with the composed configuration of conf/<verb>.yaml and the overrides as typed, by field."""

    def body(cfg: DictConfig) -> int:
        from hydra.core.hydra_config import HydraConfig
        from omegaconf import OmegaConf

        config = OmegaConf.to_container(cfg, resolve=True)
        assert isinstance(config, dict)
        typed = (str(text).lstrip("+~").partition("=") for text in HydraConfig.get().overrides.task)
        fields = {str(name): value for name, value in config.items()}
        status: int = _imported(module, function)(fields, {key: text for key, _, text in typed})
        return status

    return _composed(verb, body)


def _composed(verb: str, body: Callable[[DictConfig], int]) -> int:
    """Have Hydra compose conf/<verb>.yaml, and end the process with the status of `body`."""

    def app(cfg: DictConfig) -> None:
        from pensieve.lab.trial.terminal import in_a_sentence

        with in_a_sentence():
            status = body(cfg)
        if status:
            sys.exit(status)

    return _hydra(verb, app)


def _hydra(config_name: str, app: Callable[[DictConfig], None]) -> int:
    sys.path.insert(0, os.getcwd())  # your own policies: --config-dir=. eviction=my_policy with ./my_module.py
    with _imports():
        import hydra

        from pensieve.lab.compose.conf import conf_folder, outputs_folder
        from pensieve.lab.trial.terminal import guarded

    os.environ["PENSIEVE_OUTPUTS"] = str(outputs_folder())  # absolute, also for the processes of a launcher
    guarded(hydra.main(config_path=str(conf_folder()), config_name=config_name, version_base="1.3")(app), config_name)
    return 0


def record() -> int:
    """A proxy that records a server's traffic: --upstream http://host:8000 --out FILE; or --from FILE converts one."""
    return _plain("pensieve.lab.commands.record.command", "record", record.__doc__)


def doctor() -> int:
    """What this machine has, which models fit on it, and what to type next."""
    return _plain("pensieve.lab.commands.doctor", "doctor", doctor.__doc__)


def compare() -> int:
    """Two sweeps, or two sets of trials, metric by metric: A B."""
    return _plain("pensieve.lab.commands.results", "compare", compare.__doc__)


def results(argv: Sequence[str] | None = None) -> int:
    """What was recorded: list, show, read, export it, or write MLflow from it."""
    sys.path.insert(0, os.getcwd())  # read: a workload of one's own in the current folder
    return _plain("pensieve.lab.commands.results", "results", results.__doc__, argv)


def mlflow() -> int:
    """MLflow's copy of what was recorded: sync writes what it lacks, all of it where mlflow.db was moved away."""
    parser = argparse.ArgumentParser(description=mlflow.__doc__)
    parser.add_argument("action", choices=("sync",))
    _, rest = parser.parse_known_args()
    return results([*rest, "sync-mlflow"])


def _plain(module: str, function: str, description: str | None, argv: Sequence[str] | None = None) -> int:
    """Run that function, which parses its own arguments."""
    command = _imported(module, function)
    with _imported("pensieve.lab.trial.terminal", "in_a_sentence")():
        status: int = command(argv, description)
    return status


def _imported(module: str, function: str) -> Callable[..., Any]:
    with _imports():
        found: Callable[..., Any] = getattr(import_module(module), function)
    return found
