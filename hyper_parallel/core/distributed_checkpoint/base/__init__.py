"""What all rooms of checkpoints use: descriptions, errors, checksums, grids, and careful reading of files."""
