"""PyTorch as a platform: the only folder of the library that imports torch."""
