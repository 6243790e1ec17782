"""What ``python -m gradlane`` runs, as a script."""

import os
import sys

sys.path[0] = os.getcwd()  # as with -m

from gradlane.cli import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
