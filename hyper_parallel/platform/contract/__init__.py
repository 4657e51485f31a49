"""The contract between HyperParallel and a framework, a file for each section; ``platform.py`` puts them together."""
