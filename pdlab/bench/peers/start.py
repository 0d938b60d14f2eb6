"""Starts a peer in whatever Python it lives in: `python start.py NAME`.

This folder is made the package `peers`, and none of it is left on `sys.path`: a peer's own
`import transformers` must find the library, not the module beside this file.
"""

import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    here = Path(__file__).resolve().parent
    sys.path[0] = str(here.parent)
    serving = import_module(f"{here.name}.serve")
    del sys.path[0]
    serving.serve(sys.argv[1])


if __name__ == "__main__":
    main()
