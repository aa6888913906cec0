"""An engine process that loads for ever: it hears nothing, but leaves when its parent is gone."""

import os
import signal
import time

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.1)
