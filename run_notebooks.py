#!/usr/bin/env python3
"""Run FVC's notebooks as one experiment: from a folder of videos to an honest report.

The options are papermill's where papermill has them. Everything a run writes goes into one run folder. What the
options mean is told by ``fvc_lib.command_line.main``, and by ``--help``.
"""

from fvc_lib.command_line.main import main

if __name__ == "__main__":
    main()
