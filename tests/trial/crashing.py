"""An eviction policy that ends its trial in the way that the environment variable CRASH names, CRASHES times."""

import ctypes
import os
import signal
import time
from pathlib import Path

from pensieve.core.policies.lru import Lru


class Crash(Lru):
    def __init__(self, context):
        super().__init__(context)
        count = Path(os.environ["CRASH_COUNT"])
        done = int(count.read_text()) if count.exists() else 0
        if done >= int(os.environ.get("CRASHES", "1000")):
            return
        count.write_text(str(done + 1))
        match os.environ["CRASH"]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "native":
                ctypes.string_at(0)
            case "memory":
                raise MemoryError
            case "error":
                raise RuntimeError("it broke")
            case "hang":
                time.sleep(1000)
