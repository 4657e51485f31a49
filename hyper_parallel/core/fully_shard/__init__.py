"""Fully sharded data parallelism: parameters, gradients and optimizer states in shards, whole where they are used."""
