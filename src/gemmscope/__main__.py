"""`python -m gemmscope` is `gemmscope`."""

from gemmscope.cli.main import run

if __name__ == "__main__":
    run()
