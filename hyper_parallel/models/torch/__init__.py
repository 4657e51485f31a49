"""Reference models for PyTorch. Like `platform/torch`, this folder imports the framework; nothing else does."""
