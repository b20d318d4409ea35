"""The far end of ssh: `python -m jaxmeg.launch.keep COMMAND...` runs a command as long as the connection lasts.

Signals come as lines on standard input, since ssh passes none on without a terminal, and a terminal would mix output and errors. The end
of standard input is the end of the connection: the command and all of its session are killed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from jaxmeg.launch.supervise import Job, supervise


def main(argv: Sequence[str]) -> int:
    return supervise([Job(argv=argv, env=os.environ)], grace=0, orders=sys.stdin.fileno())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
