"""Checkpoints of others: Hugging Face folders and torch.distributed.checkpoint."""
