"""`python -m gemmscope` is `gemmscope`."""

from gemmscope.cli.main import main

if __name__ == "__main__":
    main()
