"""Everything that replaces or steers a function of PyTorch: what an upgrade must look at again. See ``install.py``."""
