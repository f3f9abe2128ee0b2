"""`python -m soloist` is the `soloist` command."""

from soloist.cli import main

if __name__ == "__main__":
    main()
