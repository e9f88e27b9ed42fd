"""Benchmarks beside their limits and peers, and the soak test: python runners/bench.py target=all. --help lists all."""

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
if (CHECKOUT / "pensieve").is_dir():
    sys.path.insert(0, str(CHECKOUT))  # runs from any folder, installed or not

try:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf

    from pensieve.bench import run_target
    from pensieve.compose import conf_folder
    from pensieve.errors import PensieveError
    from pensieve.trial import guarded
except ModuleNotFoundError as error:
    sys.exit(f"The Python package {error.name} is not installed; install it (README.md, make install) and run again.")


@hydra.main(config_path=str(conf_folder()), config_name="bench", version_base="1.3")
def app(cfg: DictConfig) -> None:
    config = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(config, dict)
    typed = (str(text).lstrip("+").partition("=") for text in HydraConfig.get().overrides.task)
    try:
        status = run_target({str(name): value for name, value in config.items()}, {key: v for key, _, v in typed})
    except PensieveError as error:
        sys.exit(str(error))
    if status:
        sys.exit(status)


if __name__ == "__main__":
    guarded(app)
