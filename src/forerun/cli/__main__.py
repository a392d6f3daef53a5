"""``python -m forerun.cli`` is ``forerun``."""

from forerun.cli import main

if __name__ == "__main__":
    main()
