"""`python -m papa` is `papa`."""

from papa.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
