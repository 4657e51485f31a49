"""`python -m hyper_parallel.cli` is the same as the console script `hyper-parallel`."""

from hyper_parallel.cli.main import run

if __name__ == "__main__":
    run()
