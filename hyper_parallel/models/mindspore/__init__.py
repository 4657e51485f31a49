"""Reference models on MindSpore."""
