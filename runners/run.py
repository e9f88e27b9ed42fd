"""One trial, or with -m a sweep: python runners/run.py [group=option] [group.field=value] [-m]. --help lists them all."""

import os
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
if (CHECKOUT / "pensieve").is_dir():
    sys.path.insert(0, str(CHECKOUT))  # runs from any folder, installed or not
sys.path.insert(0, os.getcwd())  # your own policies: --config-dir=. eviction=my_policy with ./my_module.py

try:
    import hydra
    from omegaconf import DictConfig

    from pensieve.compose import conf_folder, outputs_folder
    from pensieve.trial import guarded, run_job
except ModuleNotFoundError as error:
    sys.exit(f"The Python package {error.name} is not installed; install it (README.md, make install) and run again.")


@hydra.main(config_path=str(conf_folder()), config_name="config", version_base="1.3")
def app(cfg: DictConfig) -> None:
    run_job(cfg)


if __name__ == "__main__":
    os.environ["PENSIEVE_OUTPUTS"] = str(outputs_folder())  # absolute, also for the processes of a launcher
    guarded(app)
