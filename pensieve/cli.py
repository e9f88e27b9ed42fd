"""The command `pensieve`: one function for each verb; runners/<verb>.py call the same functions from a checkout.

A verb imports what it needs when it is called: a package that is missing is then named in one sentence.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig

MAIN_METRICS = (
    "ttft_ms_mean",
    "ttft_ms_p99",
    "tpot_ms_mean",
    "normalized_latency_ms_mean",
    "throughput_*",
    "*hit_rate",
    "miss_rate",
)
COMPARE_EPILOG = """A and B: a sweep's id, "latest", or conditions such as sweep=latest,baseline=pensieve or
model=tiny,workload.users=6 (columns of table trial, or dotted fields of the configuration).
Example: python runners/compare.py sweep=latest,baseline=pensieve sweep=latest,baseline=stateless
Latencies are paired by seed and conversation. Everything else is paired by seed: one value a trial, and an
interval from five seeds on. "A / B" is the geometric mean of the pairs' ratios."""

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
        _say(f"{missing} for {sys.executable}; going on with {python}.")
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
    with _imports():
        from pensieve.lab.trial.command import run_job

    run_job(cfg)


def size() -> int:
    """How much KV cache a load needs, as a map: [group=option] [size.gpu=[...]] [slo.ttft_ms=500]."""

    def body(cfg: DictConfig) -> int:
        with _imports():
            from hydra.core.hydra_config import HydraConfig

            from pensieve.lab.commands.size import size as run_map

        hydra = HydraConfig.get()
        if hydra.mode is not None and hydra.mode.name == "MULTIRUN":
            sys.exit("A map is a sweep of its own: leave -m out, and give sizes as size.gpu=[4GB,8GB].")
        return run_map(cfg, list(hydra.overrides.task), Path(hydra.runtime.output_dir))

    return _composed("size", body)


def advise() -> int:
    """What recorded traffic lost in the cache, and what would help: FILE [group=option] [engine=vllm blocks=N]."""
    given = [
        [text] if "=" in text or text[:1] == "-" else ["workload=trace", f"workload.path={text}"]
        for text in sys.argv[1:]
    ]
    sys.argv[1:] = [text for texts in given for text in texts]

    def body(cfg: DictConfig) -> int:
        with _imports():
            from pensieve.lab.commands.advise.advice import advise as advice_of
            from pensieve.lab.commands.advise.page import page_of, render, show
            from pensieve.lab.trial.terminal import console

        advice = advice_of(cfg, _say)
        page = page_of(advice)
        show(page, console())
        to = Path(advice.settings.to or advice.source.path.with_suffix(".advice.html")).expanduser()
        to.write_text(render(page), encoding="utf-8")
        print(f"Page:     {to}")
        return 0

    return _composed("advise", body)


def bench() -> int:
    """Benchmarks beside their limits and peers: target=all."""
    return _live("bench", "pensieve.lab.bench", "run_target")


def serve() -> int:
    """A server with the API of OpenAI: [group=option] [serve.port=8000]."""
    return _live("serve", "pensieve.serve.server.command", "serve")


def record() -> int:
    """A proxy that records a server's traffic: --upstream http://host:8000 --out FILE; or --from FILE converts one."""
    with _imports():
        from pensieve.lab.commands.record.command import parser
        from pensieve.lab.commands.record.command import record as body
        from pensieve.lab.trial.terminal import in_a_sentence

    arguments = parser(record.__doc__).parse_args()
    with in_a_sentence():
        return body(arguments)


def chat() -> int:
    """Talk to a model in the terminal: [group=option] [chat.script=FILE]."""
    return _live("chat", "pensieve.serve.server.chat", "chat")


def profile() -> int:
    """Measure this machine for its cost model and for simulating it: [group=option] [profile.to=FILE]."""
    return _live("profile", "pensieve.lab.commands.profile", "profile")


def _live(verb: str, module: str, function: str) -> int:
    """Run that function with the composed configuration of conf/<verb>.yaml and the overrides as typed, by field."""
    with _imports():
        command = getattr(import_module(module), function)

    def body(cfg: DictConfig) -> int:
        from hydra.core.hydra_config import HydraConfig
        from omegaconf import OmegaConf

        config = OmegaConf.to_container(cfg, resolve=True)
        assert isinstance(config, dict)
        typed = (str(text).lstrip("+~").partition("=") for text in HydraConfig.get().overrides.task)
        status: int = command(
            {str(name): value for name, value in config.items()}, {key: text for key, _, text in typed}
        )
        return status

    return _composed(verb, body)


def _composed(verb: str, body: Callable[[DictConfig], int]) -> int:
    """Have Hydra compose conf/<verb>.yaml, and end the process with the status of `body`."""

    def app(cfg: DictConfig) -> None:
        from pensieve.lab.trial.terminal import in_a_sentence

        with in_a_sentence(verb):
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


def doctor() -> int:
    """What this machine has, which models fit on it, and what to type next."""
    with _imports():
        from pensieve.lab.commands.doctor import report
        from pensieve.lab.commands.gpu_run import gpu_run
        from pensieve.lab.trial.terminal import in_a_sentence

    parser = argparse.ArgumentParser(description=doctor.__doc__)
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="ten minutes on a GPU: tests and benchmarks, in one file (docs/first_gpu_run.md)",
    )
    parser.add_argument(
        "--cache", default="small", help="the cache option that fitting is judged with (default: small)"
    )
    arguments = parser.parse_args()
    with in_a_sentence():
        return gpu_run(Path(__file__).resolve().parents[1]) if arguments.gpu else report(arguments.cache)


def compare() -> int:
    """Two sweeps, or two sets of trials, metric by metric: A B."""
    with _imports():
        from pensieve.lab.commands.results import opened
        from pensieve.lab.metrics import Slo
        from pensieve.lab.results.compare_trials import compare_trials, objective_of, select_trials
        from pensieve.lab.trial.terminal import console, in_a_sentence

    parser = argparse.ArgumentParser(
        description=compare.__doc__, epilog=COMPARE_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.add_argument(
        "--metrics", default=",".join(MAIN_METRICS), help="names, * allowed, comma between (default: the main ones)"
    )
    parser.add_argument("--all", action="store_true", help="every metric that both have")
    parser.add_argument(
        "--allow-mixed",
        action="store_true",
        help="compare trials of several kinds (simulated and real, contended, other weights or code); it says so",
    )
    for name, what in (("ttft", "the first token"), ("tpot", "each further token")):
        parser.add_argument(
            f"--slo-{name}-ms", type=float, help=f"the limit that goodput goes by: {what} (default: the sweep's)"
        )
    parser.add_argument("--url-env", help="environment variable with the database's URL (default: outputs/results.db)")
    options = parser.parse_args()
    wanted = ["*"] if options.all else [name.strip() for name in options.metrics.split(",")]
    with in_a_sentence():
        store = opened(options.url_env)
        words = (options.a, options.b)
        a, b = (select_trials(store, one) for one in words)
        asked = Slo(options.slo_ttft_ms, options.slo_tpot_ms)
        slo = asked if asked != Slo() else objective_of(store, *words)
        found = compare_trials(store, a, b, options.allow_mixed, slo)
    console().print(found.table(lambda name: any(fnmatch(name, pattern) for pattern in wanted)))
    return 0


def results(argv: Sequence[str] | None = None) -> int:
    """What was recorded: list, show, read, export it, or write MLflow from it."""
    sys.path.insert(0, os.getcwd())  # read: a workload of one's own in the current folder
    with _imports():
        from pensieve.lab.commands.results import results as body
        from pensieve.lab.trial.terminal import in_a_sentence

    with in_a_sentence():
        return body(argv, results.__doc__)


def mlflow() -> int:
    """MLflow's copy of what was recorded: sync writes what it lacks, all of it where mlflow.db was moved away."""
    parser = argparse.ArgumentParser(description=mlflow.__doc__)
    parser.add_argument("action", choices=("sync",))
    _, rest = parser.parse_known_args()
    return results([*rest, "sync-mlflow"])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
