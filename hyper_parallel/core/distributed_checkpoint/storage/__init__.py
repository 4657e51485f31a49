"""Places for checkpoints: directories and object stores, names of files, marks, locks and clean-up."""
