"""Benchmarks and the soak test: python runners/bench.py target=soak bench.turns=10000. --help lists the targets."""

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
if (CHECKOUT / "pensieve").is_dir():
    sys.path.insert(0, str(CHECKOUT))  # runs from any folder, installed or not

import hydra  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402

from pensieve.bench.targets import run_target  # noqa: E402
from pensieve.compose import conf_folder  # noqa: E402
from pensieve.errors import PensieveError  # noqa: E402
from pensieve.trial import guarded  # noqa: E402


@hydra.main(config_path=str(conf_folder()), config_name="bench", version_base="1.3")
def app(cfg: DictConfig) -> None:
    options = OmegaConf.to_container(cfg.bench, resolve=True)
    assert isinstance(options, dict)
    try:
        status = run_target(str(cfg.target), {str(name): value for name, value in options.items()})
    except PensieveError as error:
        sys.exit(str(error))
    if status:
        sys.exit(status)


if __name__ == "__main__":
    guarded(app)
