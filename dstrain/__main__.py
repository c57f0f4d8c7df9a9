"""`python -m dstrain`, and `torchrun -m dstrain`: the same as the command `dstrain`."""

import sys

from dstrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
