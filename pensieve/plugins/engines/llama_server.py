"""llama.cpp's server, from the wheel of xllamacpp, until this process is ended: python llama_server.py JSON.

The JSON: {"file": of the model, "port": to listen on, "fields": of the baseline}. Runs by its path, beside the package.
"""

import json
import signal
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    import xllamacpp

    from pensieve.plugins.engines.llama_cpp import EVERYTHING, params_of

    asked = json.loads(sys.argv[1])
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    server = xllamacpp.Server(params_of(Path(asked["file"]), asked["fields"], asked["port"], EVERYTHING))
    while not ended.wait(1.0):
        pass
    del server
