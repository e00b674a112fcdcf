"""`python -m deep_moe`: the command line, also in a source checkout that is not installed."""

from .cli import main

if __name__ == "__main__":
    main()
