"""An engine to be killed: goes to a stage, says so, and waits for its end or a word.

Arguments: session, folder, stage, the stages whose blocks must be there. On stdin:
``exit`` ends the process at once with an exit code, ``check`` has the engine prove that
all is well and leave in order.
"""

import os
import sys
import threading
from pathlib import Path

import death_kit as dk

from shmoffload.engine import Engine


def say(word):
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def obey(told):
    for line in sys.stdin:
        if line == "exit\n":
            os._exit(dk.EXIT_CODE)
        told.set()
    os._exit(1)


def main():
    session, folder, stage = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    told = threading.Event()
    threading.Thread(target=obey, args=(told,), daemon=True).start()
    with Engine(dk.make_config(session, folder)) as engine:
        if sys.argv[4:]:
            dk.check_serves(engine, sys.argv[4:])
            dk.kit.drop_primary(engine)
        dk.reach(stage, engine, dk.make_control(folder))
        say("there")
        if stage != "draining":
            assert told.wait(dk.WAIT_S)
            dk.settle(engine)
            dk.check_serves(engine, [stage])
    say("done")


if __name__ == "__main__":
    main()
