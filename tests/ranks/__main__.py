"""``python -m ranks``: one rank. (``-m ranks.rank`` would load that file twice, as two modules with two classes.)"""

import sys

from .rank import main

sys.exit(main(sys.argv[1:]))
