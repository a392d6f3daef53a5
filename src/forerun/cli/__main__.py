"""Entry point of ``python -m forerun.cli``."""

from forerun.cli import main

if __name__ == "__main__":
    main()
