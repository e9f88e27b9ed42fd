"""The model of a disaggregated baseline, until its client is gone: python model_server.py.

Standard input: a pickle of {"setup": EngineSetup, "keeps_weights", "gbps", "key"}. Standard output: one line of JSON when it
is ready, with the port of the loopback interface that it listens on. Runs by its path, beside the package.
"""

import json
import os
import pickle
import sys
from array import array
from contextlib import suppress
from multiprocessing.connection import Listener
from pathlib import Path
from time import perf_counter


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log
    host(pickle.load(sys.stdin.buffer), lambda said: print(json.dumps(said), file=out))


def host(asked, announce) -> None:  # type: ignore[no-untyped-def]
    """Load the model, say where it is, and serve one client until it is gone."""
    import torch
    import transformers

    from pensieve.plugins.engines.disaggregated.remote_model import RemoteModel
    from pensieve.plugins.engines.disaggregated.wire import Wire

    model = RemoteModel(asked["setup"], asked["keeps_weights"])
    with Listener(("127.0.0.1", 0), authkey=asked["key"]) as listener:
        said = {
            "port": listener.address[1],
            "load_s": model.load_s,
            "weight_bytes": model.weight_bytes,
            "version": transformers.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        announce(said)
        with listener.accept() as connection, suppress(EOFError, ConnectionError):  # the client is gone
            serve(Wire(connection, asked["gbps"]), model)


def serve(wire, model) -> None:  # type: ignore[no-untyped-def]
    """Answer until the client is gone, which raises EOFError or ConnectionError."""
    from pensieve.plugins.engines.disaggregated import messages

    while True:
        arrived = wire.receive()
        here = perf_counter()
        said = arrived.said
        try:
            if said["do"] == messages.STEP:
                back, began, ended = model.step(array("i", said["ids"]), arrived.arrays)
                told = messages.stepped(arrived.flight_s + began - here, ended - began)
                wire.send(told, back, began_s=ended)
            elif said["do"] == messages.GENERATE:
                generate(wire, model, said, arrived.flight_s)
        except (RuntimeError, IndexError, ValueError, KeyError) as error:
            wire.send(messages.failed(f"The model's process failed the request: {error!r}"))


def generate(wire, model, said, flight_s: float) -> None:  # type: ignore[no-untyped-def]
    """A token as soon as it is drawn, until the last one or until the client says stop."""
    from pensieve.plugins.engines.disaggregated import messages

    waited, computed = flight_s, 0.0
    for drawn, last, seconds in model.decode(array("i", said["ids"]), said["tokens"], said["ends"]):
        computed += seconds
        if not last and wire.waiting:
            assert wire.receive().said["do"] == messages.STOP
            last = True
        if last:
            wire.send(messages.last_token(drawn, waited, computed))
            return
        began = perf_counter()
        wire.send(messages.token(drawn))
        waited += perf_counter() - began


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[4]))
    main()
