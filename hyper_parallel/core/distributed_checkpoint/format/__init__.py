"""What is in the files: shards, the index, objects, and reading them with every byte checked."""
