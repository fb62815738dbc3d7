# SPDX-License-Identifier: Apache-2.0
"""``python -m statescan``: the same program as the ``statescan`` command. No code of its own."""

import sys

from statescan.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
