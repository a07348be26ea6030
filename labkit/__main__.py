"""`python -m labkit`: the command line."""

from labkit.cli import main

if __name__ == "__main__":
    main()
