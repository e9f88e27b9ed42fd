"""Conversations of a data set on the Hugging Face hub, through the package `datasets`."""

from __future__ import annotations

import importlib
from pathlib import Path

from pensieve.errors import EngineMissing, MalformedInput
from pensieve.lab.workload.formats.reading import OnMalformed, Reader
from pensieve.lab.workload.formats.text import KINDS, sharegpt
from pensieve.lab.workload.recording import Recording


def load_from_hub(name: str, split: str, on_malformed: OnMalformed) -> Recording:
    """Every conversation of one split, from the local cache of the hub or over the network.

    Raises EngineMissing without the package, MalformedInput where the data set cannot be had.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise EngineMissing(
            f"workload.path={name} is no file here, and a name on the hub needs the package datasets "
            "(pip install datasets); or give the path of a JSON file."
        ) from error
    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # the library raises dozens of types for a name, a split or a network that is not there
        reason = (str(error).strip() or repr(error)).splitlines()[0].rstrip(".")
        raise MalformedInput(
            f"The data set {name} (split {split}) cannot be loaded from the hub: {reason}. workload.path also takes a "
            "downloaded JSON file."
        ) from error
    reader = Reader(Path(name), on_malformed)
    return KINDS["sharegpt"].recording("sharegpt", reader, reader.entries(rows, sharegpt, f"{name} ({split})"))
