"""`python -m tokendrop`."""

from tokendrop.cli import main

if __name__ == "__main__":
    main()
