"""Lets ``python -m forerun.cli`` run the command line."""

from forerun.cli import main

if __name__ == "__main__":
    main()
