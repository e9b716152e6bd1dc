"""`python -m demask`: the command line."""

from demask.cli import main

if __name__ == "__main__":
    main()
