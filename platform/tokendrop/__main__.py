"""`python -m tokendrop`."""

from tokendrop.cli.main import main

if __name__ == "__main__":
    main()
