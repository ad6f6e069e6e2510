"""`python -m papa` runs the command `papa`."""

from papa.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
